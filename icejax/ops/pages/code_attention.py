"""Attention to tokens in codes of a few bits: which of them weigh most, and what all others contribute.

Policies Packed and Coded call it in a decode step: for all pages, or for pages that digests select. Codes are [B, K, P, ...],
and are decoded in parts, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from icejax.ops.attention.dense import EINSUM, Attended, Scoring, masked_scores
from icejax.ops.pages.code_error import CodeNoise, noise_without_values
from icejax.ops.pages.key_codes import KeyCodes, decode_keys, encode_keys
from icejax.ops.slots import merge_heads
from icejax.ops.topk import best

SCALES = "int8"  # of offsets and steps; in 16 bits errors were nearly the same, for more bytes
PARTS = 8  # parts in which codes are decoded
LEAST = 128  # pages of a part; smaller parts would make many small products


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CodedPages:
    """The keys and values of pages in codes, each with an offset and a step per page and channel.

    Attributes:
        count: tokens of a page; 0 for an empty page.
        values: None where the keys hold the values.
    """

    count: jax.Array  # i32[B, K, P]
    keys: KeyCodes
    values: KeyCodes | None


class CodedTokens(NamedTuple):
    """The result of `attend_codes`.

    Attributes:
        ids: the slots of largest weight among all P p slots, or the pages, largest first, i32[B, K, M].
        counts: tokens of each: 1 for a slot with a token, 0 for an empty one, i32[B, K, M].
        rest: attention to the tokens in all other slots and outside the pages, f32[B, K, G, Hv] and f32[B, K, G].
        noise: the expected error of the codes in the rest, with [B, K] in place of R; None unless it is estimated.
    """

    ids: jax.Array
    counts: jax.Array
    rest: Attended
    noise: CodeNoise | None = None


def encode_pages(
    k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"], bits: int
) -> CodedPages:
    """Returns the codes of pages; slots outside `mask` are not read."""
    keys, values = (None if x is None else encode_keys(x, mask, bits, SCALES) for x in (k, v))
    return CodedPages(mask.sum(-1, dtype=jnp.int32), keys, values)


def decoded_planes(pages: CodedPages, *, page_size: int, bits: int, dtype: str) -> tuple[Float[Array, "B K P p _"], ...]:
    """Returns the decoded keys and values of pages; keys alone where they hold the values."""
    planes = (x for x in (pages.keys, pages.values) if x is not None)
    return tuple(decode_keys(x, page_size, bits, dtype) for x in planes)


def attend_codes(
    q: Float[Array, "B K G H"],
    pages: CodedPages,
    outside: Attended,
    *,
    scoring: Scoring,
    page_size: int,
    bits: int,
    wanted: int,
    guess: Float[Array, "B K G H"] | None = None,
    whole: bool = False,
    estimate: bool = False,
) -> CodedTokens:
    """Returns the `wanted` slots of largest softmax weight, summed over query heads, and the attention to all others by codes.

    With the weights 0.5, 0.2 and 0.1 of three tokens, 0.2 of the tokens outside the pages, and `wanted` 1, the first slot is
    returned; in the rest the other two weigh 0.4 and 0.2, and the tokens outside 0.4.

    Args:
        outside: attention to the tokens outside the pages, f32[B, K, G, Hv] and f32[B, K, G], -inf if there are none. Where
            keys hold the values, a value has the first Hv channels of a key.
        guess: queries to choose slots by instead of `q`.
        whole: whether to return the pages of largest weight instead of slots.
        estimate: whether to estimate the error that codes leave.
    """
    p, queries, parts = page_size, merge_heads(q), _parts(pages.count.shape[2])
    outside, value_size = Attended(*map(merge_heads, outside)), outside.out.shape[-1]
    queries, group = queries if guess is None else jnp.concatenate([queries, merge_heads(guess)], axis=1), q.shape[2]
    slots = merge_heads(jnp.arange(p)[None, None, None] < pages.count[..., None])
    slots = slots.reshape(len(queries), -1)
    scores, codes = [], pages.keys
    for part in parts:
        keys, mask = _decoded(codes, part, p, bits, str(q.dtype)), slots[:, None, part.start * p : part.stop * p]
        scores.append(masked_scores(queries, keys, mask, scoring=scoring))
        # The next part waits for these scores: XLA:GPU would otherwise hold the decoded keys of all parts at once.
        codes, scores[-1] = jax.lax.optimization_barrier((codes, scores[-1]))
    scores = jnp.concatenate(scores, axis=-1)
    scores, choice = scores[:, :group], scores[:, -group:]
    total = jnp.logaddexp(jax.nn.logsumexp(choice, axis=-1), outside.lse)
    worth, counts = jnp.exp(choice - _finite(total)[..., None]).sum(1), slots.astype(jnp.int32)
    if whole:
        worth, counts = (x.reshape(len(x), -1, p).sum(-1) for x in (worth, counts))
    ids, selected, (counts,) = best(jnp.where(counts > 0, worth, -1.0), min(wanted, worth.shape[-1]), counts)
    selected = jnp.repeat(selected, p, axis=1) if whole else selected
    scores = jnp.where(selected[:, None], -jnp.inf, scores)
    lse = jnp.logaddexp(jax.nn.logsumexp(scores, axis=-1), outside.lse)
    out = jnp.exp(outside.lse - _finite(lse))[..., None] * outside.out
    weights = jnp.exp(scores - _finite(lse)[..., None])
    codes, noise = codes if pages.values is None else pages.values, None
    if estimate:
        coded = jax.tree.map(merge_heads, (pages.keys, codes, pages.count))
        noise, moved = noise_without_values(merge_heads(q), *coded, weights, Attended(out, lse), scoring=scoring, bits=bits)
    for part in parts:
        values = _decoded(codes, part, p, bits, str(q.dtype))[..., :value_size]
        of_part = slice(part.start * p, part.stop * p)
        out += EINSUM("rgs,rsh->rgh", weights[..., of_part].astype(values.dtype), values)
        if noise is not None:
            noise = noise.with_values(moved[..., of_part], values)
        codes, out = jax.lax.optimization_barrier((codes, out))
    tokens = CodedTokens(ids, counts, Attended(out, lse), noise)
    return jax.tree.map(lambda x: x.reshape(*q.shape[:2], *x.shape[1:]), tokens)


def _parts(pages: int) -> list[slice]:
    """Returns parts of at least `LEAST` pages, and at most `PARTS` of them."""
    size = max(LEAST, -(-pages // PARTS))
    return [slice(first, min(first + size, pages)) for first in range(0, pages, size)]


def _decoded(codes: KeyCodes, part: slice, page_size: int, bits: int, dtype: str) -> Float[Array, "R S _"]:
    """Returns the decoded keys or values of a part of the pages."""
    vectors = merge_heads(decode_keys(jax.tree.map(lambda x: x[:, :, part], codes), page_size, bits, dtype))
    return vectors.reshape(len(vectors), -1, vectors.shape[-1])


def _finite(lse: Float[Array, "R G"]) -> Float[Array, "R G"]:
    """Returns a log-sum-exp as a base of exponents: 0 without any token."""
    return jnp.where(jnp.isneginf(lse), 0.0, lse)
