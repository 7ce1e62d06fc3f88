"""Attention through codes of pages, and through peers' quantised caches: for `bench.attention.two_precisions`.

Shapes: queries [Q, K, G, H] of Q steps; pages are keys and values f32[K, P, p, H] and a mask of slots bool[K, P, p].
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bench.attention.page_attention import from_keys_of
from icejax.cache.index.digest_tree import Digested
from icejax.ops.attention.dense import Attended, Scoring
from icejax.ops.pages import tree, tree_walk
from icejax.ops.pages.digests import score
from icejax.ops.pages.key_codes import KeyCodes, decode_keys, encode_keys
from icejax.ops.pages.key_scatter import along
from icejax.ops.topk import best, ranks

KIVI_GROUP, KIVI_NEWEST = 32, 128  # tokens of a key's group, and newest tokens that KIVI does not quantise
BLOCK = 32  # channels of a block of q8_0 and q4_0
GROUP = 32  # channels of a token that share an offset and a step, as in KIVI


class Coding(NamedTuple):
    """How pages are coded.

    Attributes:
        key_bits, value_bits: bits of a code; no bits of values: values are estimated from keys, as `clustered` does.
        scales: dtype of offsets and steps; `int8` and `float8_e4m3fn` have one fp32 scale per page.
        by_token: whether values have an offset and a step per token and 32 channels; else per page and channel, as keys have.
        centred: whether the head's mean key is subtracted from keys first.
    """

    key_bits: int
    value_bits: int
    scales: str
    by_token: bool
    centred: bool


class Coded(NamedTuple):
    """Decoded pages.

    Attributes:
        keys, values: f32[K, P, p, H].
        page_bytes: bytes of a page's codes, offsets and steps, keys and values.
    """

    keys: jax.Array
    values: jax.Array
    page_bytes: int


def coded(pages: tuple[jax.Array, jax.Array, jax.Array], index: Digested, coding: Coding) -> Coded:
    """Returns the pages [1, K, P, p, H] as their codes stand for them; `index` estimates values that have no codes."""
    codes, planes = _coded(*pages, index, coding=coding)
    keys, values = (x[0] for x in planes)
    return Coded(keys, values, sum(x.nbytes for x in jax.tree.leaves(codes)) // (keys.shape[0] * keys.shape[1]))


@jax.jit(static_argnames="coding")
def _coded(k, v, mask, index: Digested, *, coding: Coding):
    size, page_size = k.shape[-1], k.shape[3]
    tokens = mask.sum((2, 3), dtype=jnp.float32)[..., None, None, None]
    centre = jnp.where(mask[..., None], k, 0).sum((2, 3), keepdims=True) / tokens if coding.centred else 0.0
    codes_of_keys = encode_keys(k - centre, mask, coding.key_bits, coding.scales)
    keys = decode_keys(codes_of_keys, page_size, coding.key_bits, "float32") + centre
    if not coding.value_bits:
        return codes_of_keys, (keys, _values_from_keys(keys, mask, index))
    if coding.by_token:
        codes_of_values = encode_by_token(v, mask, coding.value_bits, coding.scales)
        return (codes_of_keys, codes_of_values), (keys, decode_by_token(codes_of_values, size, coding.value_bits, "float32"))
    codes_of_values = encode_keys(v, mask, coding.value_bits, coding.scales)
    return (codes_of_keys, codes_of_values), (keys, decode_keys(codes_of_values, page_size, coding.value_bits, "float32"))


def encode_by_token(v: jax.Array, mask: jax.Array, bits: int, scales: str) -> KeyCodes:
    """Returns codes of values [B, K, P, p, H] with a `low` and a `step` per token and `GROUP` channels.

    Slots outside `mask` are not read.

    A page's group of channels is a page of its own, whose slots are the channels and whose channels are the tokens: a page of
    16 tokens of 64 channels has two, each with 32 slots of 16 channels.
    """
    batch, heads, pages, page_size, size = v.shape
    groups = -(-size // GROUP)
    v = jnp.pad(jnp.where(mask[..., None], v, 0), [(0, 0)] * 4 + [(0, groups * GROUP - size)])
    v = v.reshape(batch, heads, pages, page_size, groups, GROUP).transpose(0, 1, 2, 4, 5, 3)
    channels = (jnp.arange(groups * GROUP) < size).reshape(groups, GROUP)
    channels = jnp.broadcast_to(channels, (batch, heads, pages, groups, GROUP)).reshape(batch, heads, -1, GROUP)
    return encode_keys(v.reshape(batch, heads, -1, GROUP, page_size), channels, bits, scales)


def decode_by_token(codes: KeyCodes, size: int, bits: int, dtype: str) -> jax.Array:
    """Returns the decoded values [B, K, P, p, H], of `size` channels; values of empty slots are 0."""
    v = decode_keys(codes, GROUP, bits, dtype)
    batch, heads, _, _, page_size = v.shape
    v = v.reshape(batch, heads, -1, -(-size // GROUP), GROUP, page_size).transpose(0, 1, 2, 5, 3, 4)
    return v.reshape(*v.shape[:4], -1)[..., :size]


def _values_from_keys(keys: jax.Array, mask: jax.Array, index: Digested) -> jax.Array:
    """Returns the mean value of each token's page, corrected by the token's key (`icejax.ops.pages.tail`)."""
    valid, tokens = mask[..., None], mask.sum(-1, dtype=jnp.float32)[..., None, None]
    mean = jnp.where(valid, keys, 0).sum(3, keepdims=True) / jnp.maximum(tokens, 1)
    moved = jnp.einsum("bkpsh,bkhv->bkpsv", jnp.where(valid, keys - mean, 0), index.fit.matrix)
    return index.levels[0].value.read()[:, :, : keys.shape[2], None] + moved


@jax.jit
def look(q: jax.Array, index: Digested, pages: jax.Array) -> tuple[jax.Array, Attended]:
    """Returns which pages the digests choose, bool[Q, K, P], and the tail of all others; every digest is scored.

    Args:
        pages: number of pages to choose.
    """
    scoring, from_keys, digests = Scoring(q.shape[-1] ** -0.5), from_keys_of(index), index.levels[0]

    def step(x: jax.Array) -> tuple[jax.Array, Attended]:
        spans = along(x[None], index.scatter, scoring=scoring)
        scores = score(x[None], digests, spans, scoring=scoring)
        worth = jax.nn.softmax(scores.choice, axis=-1).sum(2)
        chosen = (ranks(worth) < pages) & (digests.count > 0)
        tail = scores._replace(weight=jnp.where(chosen[:, :, None], -jnp.inf, scores.weight))
        out, lse = tree_walk.tail_of([(tail, digests)], spans, from_keys)
        return chosen[0], Attended(out[0], lse[0])

    return jax.lax.map(step, q)


@jax.jit(static_argnames=("pages", "opened"))
def walked(q: jax.Array, index: Digested, *, pages: int, opened: int) -> tuple[jax.Array, Attended]:
    """Returns what `look` does, with pages that the digest tree chooses.

    Args:
        opened: least number of nodes that a level opens; more for many pages, as in `Clustered`.
    """
    scoring, from_keys = Scoring(q.shape[-1] ** -0.5), from_keys_of(index)
    rules = tree_walk.WalkRules(opened=tree.num_opened(pages, least=opened), selected=pages)

    def step(x: jax.Array) -> tuple[jax.Array, Attended]:
        result = tree_walk.walk(x[None], index.levels, index.scatter, scoring=scoring, rules=rules, from_keys=from_keys)
        heads = jnp.arange(len(x))[:, None]
        chosen = jnp.zeros(index.levels[0].count.shape[1:], bool).at[heads, result.page_ids[0]].set(result.counts[0] > 0)
        return chosen, Attended(result.tail_out[0], result.tail_lse[0])

    return jax.lax.map(step, q)


@jax.jit(static_argnames="exact")
def attend(
    q: jax.Array,
    near: tuple[jax.Array, jax.Array],
    pages: tuple[jax.Array, jax.Array, jax.Array],
    decoded: tuple[jax.Array, jax.Array],
    chosen: jax.Array,
    rest: Attended,
    *,
    exact: int,
) -> jax.Array:
    """Returns the output [Q, K, G, H] of exact near tokens, chosen pages and the rest.

    The `exact` tokens of largest softmax weight, summed over the query heads, count exactly; the other tokens of the chosen
    pages count with their decoded keys and values.

    Args:
        near: keys and values [K, S, H] of sinks and window.
        decoded: keys and values of the pages, from `coded`.
        chosen: pages whose codes are read, bool[Q, K, P].
        rest: attention to all other pages, [Q, K, G, H] and [Q, K, G].
    """
    flat = functools.partial(jnp.reshape, shape=(q.shape[1], -1, q.shape[-1]))
    slots = (pages[2][None] & chosen[..., None]).reshape(*q.shape[:2], -1)
    near_scores, true_scores, scores = (_scores(q, x) for x in (near[0], flat(pages[0]), flat(decoded[0])))
    scores = jnp.where(slots[:, :, None], scores, -jnp.inf)
    own = [near_scores, rest.lse[..., None]]
    selected = jnp.zeros_like(slots)
    if exact:
        total = jax.nn.logsumexp(jnp.concatenate([*own, scores], axis=-1), axis=-1, keepdims=True)
        worth = jnp.where(slots, jnp.exp(scores - total).sum(2), -1.0)
        selected = best(worth, exact)[1] & slots
    scores = jnp.where(selected[:, :, None], true_scores, scores)
    weights = jax.nn.softmax(jnp.concatenate([*own, scores], axis=-1), axis=-1)
    count = near_scores.shape[-1]
    near_weights, rest_weight, weights = weights[..., :count], weights[..., count], weights[..., count + 1 :]
    exact_weights = jnp.where(selected[:, :, None], weights, 0)
    return (
        _outputs(near_weights, near[1])
        + _outputs(exact_weights, flat(pages[1]))
        + _outputs(weights - exact_weights, flat(decoded[1]))
        + rest_weight[..., None] * rest.out
    )


@jax.jit
def attend_dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Returns the output [Q, K, G, H] of attention to all tokens [K, S, H]."""
    return _outputs(jax.nn.softmax(_scores(q, k), axis=-1), v)


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("qkgh,ksh->qkgs", q, k) * q.shape[-1] ** -0.5


def _outputs(weights: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("qkgs,ksh->qkgh", weights, v)


def q8_0(x: jax.Array) -> jax.Array:
    """Returns tokens [K, S, H] as llama.cpp's q8_0 stores them: blocks of 32 channels, a fp16 scale, codes -127 to 127."""
    blocks = x.reshape(*x.shape[:2], -1, BLOCK)
    scale = jnp.abs(blocks).max(-1, keepdims=True) / 127
    codes = jnp.round(blocks / jnp.maximum(scale, 1e-30))
    return (codes * _half(scale)).reshape(x.shape)


def q4_0(x: jax.Array) -> jax.Array:
    """Returns tokens [K, S, H] as llama.cpp's q4_0 stores them: blocks of 32 channels, a fp16 scale, codes -8 to 7.

    The scale is the value of largest magnitude divided by -8, so that this value has the code -8.
    """
    blocks = x.reshape(*x.shape[:2], -1, BLOCK)
    largest = jnp.take_along_axis(blocks, jnp.abs(blocks).argmax(-1, keepdims=True), axis=-1)
    scale = largest / -8
    codes = jnp.clip(jnp.floor(jnp.where(scale == 0, 0, blocks / jnp.where(scale == 0, 1, scale)) + 8.5), 0, 15) - 8
    return (codes * _half(scale)).reshape(x.shape)


def kivi_keys(k: jax.Array, bits: int) -> jax.Array:
    """Returns keys [K, S, H] as KIVI stores them: by channel over 32 tokens in a row, the newest tokens exactly."""
    old = (k.shape[1] - KIVI_NEWEST) // KIVI_GROUP * KIVI_GROUP
    groups = k[:, :old].reshape(len(k), -1, KIVI_GROUP, k.shape[-1])
    return jnp.concatenate([_evenly(groups, 2, bits).reshape(len(k), old, -1), k[:, old:]], axis=1)


def kivi_values(v: jax.Array, bits: int) -> jax.Array:
    """Returns values [K, S, H] as KIVI stores them: by token in groups of 32 channels, the newest tokens exactly."""
    old = (v.shape[1] - KIVI_NEWEST) // KIVI_GROUP * KIVI_GROUP
    groups = v[:, :old].reshape(len(v), old, -1, BLOCK)
    return jnp.concatenate([_evenly(groups, 3, bits).reshape(len(v), old, -1), v[:, old:]], axis=1)


def _evenly(x: jax.Array, axis: int, bits: int) -> jax.Array:
    """Returns `x` rounded to 2^bits levels from the least to the largest along `axis`; least and step in fp16."""
    least, largest = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    step = (largest - least) / (2**bits - 1)
    codes = jnp.clip(jnp.round((x - least) / jnp.maximum(step, 1e-30)), 0, 2**bits - 1)
    return codes * _half(step) + _half(least)


def _half(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float16).astype(jnp.float32)
