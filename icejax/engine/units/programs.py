"""The programs of the units of a prefill: keys and values of tokens, a block of queries, the pages of a KV head.

`PrefillJob` calls them for one row of padded tokens [1, T, D]. The first token or query of a unit is a traced number, so a
program serves all units of a layer, and all layers of its kind. Buffers are donated and written in place.

Example: a prompt of 8,192 tokens in blocks of 512: the unit with `first` 1,024 attends with the queries 1,024 to 1,535 to the
keys 0 to 1,535, and replaces the input of these tokens by the layer's output.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from icejax.cache.protocol import CachePolicy, Heads, Outcome, Shared
from icejax.cache.shares import ORDER, PAGES, state_cuts
from icejax.cache.sizes import CacheSpec
from icejax.engine.prefill import expert_uses, prefill_outcome
from icejax.models.decoder import DecoderLayer
from icejax.models.sharding import module_cuts
from icejax.ops.attention.dense import BLOCK, Attended, attend_slots
from icejax.ops.slots import by_head
from icejax.runtime.mesh import WHOLE, Mesh, cut, on_mesh, stream_cut, stream_parts


class Keys(NamedTuple):
    """Keys and values of all tokens in the layout of a cache; 0 in padding.

    Attributes:
        k, v: dtype[1, K, T, H] and dtype[1, K, T, Hv].
    """

    k: jax.Array
    v: jax.Array


class Queries(NamedTuple):
    """The arrays that the blocks of a layer write: policies read the queries of all tokens and their attention.

    Attributes:
        q: queries after RoPE, dtype[1, T, N, H].
        attended: their attention, dtype[1, T, N, Hv] and f32[1, T, N].
        uses: i32[E], how many tokens are routed to each expert; None: a layer without experts.
    """

    q: jax.Array
    attended: Attended
    uses: jax.Array | None


KEYS, QUERIES = Keys(cut(1), cut(1)), Queries(cut(2), cut(2), WHOLE)  # how they are cut for a mesh


def _outcome_cuts(policy: CachePolicy, spec: CacheSpec, mesh: Mesh | None) -> Outcome:
    return Outcome(state_cuts(policy, spec, mesh), pages=PAGES, shared=ORDER)


@jax.jit
def empty_buffers(layer: DecoderLayer, x: Float[Array, "1 T D"]) -> tuple[Keys, Queries]:
    """Returns the buffers of a layer, all 0."""
    return on_mesh(layer.mesh, _empty_buffers, (layer, x), (module_cuts(layer), stream_cut(layer.mesh)), (KEYS, QUERIES))


def _empty_buffers(layer: DecoderLayer, x: jax.Array) -> tuple[Keys, Queries]:
    positions = jnp.zeros((1, x.shape[1] * stream_parts(layer.mesh)), jnp.int32)
    q, k, v = jax.eval_shape(lambda: layer.enter(x, positions, jnp.zeros(1, jnp.int32))[:3])
    keys = Keys(*(jnp.zeros((1, y.shape[2], y.shape[1], y.shape[3]), y.dtype) for y in (k, v)))
    uses = None if layer.config.experts is None else jnp.zeros(layer.config.experts.count, jnp.int32)
    attended = Attended(jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype), jnp.zeros(q.shape[:3]))
    return keys, Queries(jnp.zeros(q.shape, q.dtype), attended, uses)


@functools.partial(jax.jit, static_argnames="count", donate_argnames="keys")
def write_keys(
    layer: DecoderLayer, x: Float[Array, "1 T D"], keys: Keys, lengths: Int[Array, " 1"], first: Int[Array, ""], *, count: int
) -> Keys:
    """Returns `keys` with the `count` tokens from `first` on; donates `keys`."""
    arrays, cuts = (layer, x, keys, lengths, first), (module_cuts(layer), stream_cut(layer.mesh), KEYS, WHOLE, WHOLE)
    return on_mesh(layer.mesh, functools.partial(_with_keys, count=count), arrays, cuts, KEYS)


def _with_keys(layer: DecoderLayer, x: jax.Array, keys: Keys, lengths: jax.Array, first: jax.Array, *, count: int) -> Keys:
    positions = first + jnp.arange(count, dtype=jnp.int32)[None]
    heads = layer.enter(_own(layer, x, first, count), positions, lengths)
    is_token = (positions < lengths[:, None])[:, None, :, None]
    new = (jnp.where(is_token, by_head(y), 0) for y in (heads.k, heads.v))
    return Keys(*(lax.dynamic_update_slice_in_dim(old, y, first, axis=2) for old, y in zip(keys, new, strict=True)))


def _own(layer: DecoderLayer, x: jax.Array, first: jax.Array, count: int) -> jax.Array:
    """Returns the rows of a device's own tokens among the `count` from `first` on; both are multiples of `mesh.MULTIPLE`."""
    parts = stream_parts(layer.mesh)
    return lax.dynamic_slice_in_dim(x, first // parts, count // parts, axis=1)


@functools.partial(jax.jit, static_argnames="count", donate_argnames=("x", "queries"))
def run_block(
    layer: DecoderLayer,
    x: Float[Array, "1 T D"],
    queries: Queries,
    keys: Keys,
    lengths: Int[Array, " 1"],
    first: Int[Array, ""],
    *,
    count: int,
) -> tuple[Float[Array, "1 T D"], Queries]:
    """Returns `x` and `queries` after the layer has computed the `count` tokens from `first` on; donates both.

    Attention is `attend_slots` on every platform, also on GPU, where a whole prompt's attention in bf16 runs in cuDNN. A latent
    layer attends with the heads that are cached, because expanded heads of all keys would be made again for every block. On a
    CPU a layer of DeepSeek-V2-Lite takes 1.4 times as long as in a whole prefill of 4,096 tokens.
    """
    arrays, stream = (layer, x, queries, keys, lengths, first), stream_cut(layer.mesh)
    cuts = module_cuts(layer), stream, QUERIES, KEYS, WHOLE, WHOLE
    return on_mesh(layer.mesh, functools.partial(_run_block, count=count), arrays, cuts, (stream, QUERIES))


def _run_block(
    layer: DecoderLayer, x: jax.Array, queries: Queries, keys: Keys, lengths: jax.Array, first: jax.Array, *, count: int
) -> tuple[jax.Array, Queries]:
    block = _own(layer, x, first, count)
    q = layer.enter(block, first + jnp.arange(count, dtype=jnp.int32)[None], lengths).q
    new = jnp.clip(lengths - first, 0, count)
    with jax.named_scope("attend"):
        sizes = dict(window=layer.config.window, scoring=layer.scoring, block=math.gcd(BLOCK, keys.k.shape[2]))
        out, lse = attend_slots(q, *keys, seen=first[None], lengths=new, **sizes)
        attended = Attended(out.astype(q.dtype), lse)
    block, experts = layer.leave(block, attended)

    def put(old: jax.Array, part: jax.Array, at: jax.Array = first) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(old, part, at, axis=1)

    uses = None if experts is None else queries.uses + expert_uses(experts, new, layer.config.experts.count)
    attended = Attended(*map(put, queries.attended, attended))
    return put(x, block, first // stream_parts(layer.mesh)), Queries(put(queries.q, q), attended, uses)


@jax.jit
def with_positions(keys: Keys, queries: Queries) -> tuple[Keys, Queries]:
    """Returns keys and queries in fp32 with the tokens' positions in place of their values."""
    positions = jnp.arange(keys.v.shape[2], dtype=jnp.float32)[None, None, :, None]
    keys = Keys(keys.k.astype(jnp.float32), jnp.broadcast_to(positions, keys.v.shape))
    return keys, queries._replace(q=queries.q.astype(jnp.float32))


@functools.partial(jax.jit, static_argnames=("policy", "spec"))
def pack(
    layer: DecoderLayer, keys: Keys, queries: Queries, lengths: Int[Array, " 1"], shared: Shared | None, *,
    policy: CachePolicy, spec: CacheSpec,
) -> Outcome:  # fmt: skip
    """Returns the outcome of the policy's `prefill`."""
    run, arrays = functools.partial(_outcome, policy=policy, spec=spec), (layer, keys, queries, lengths, shared)
    return on_mesh(layer.mesh, run, arrays, _inputs_cuts(layer), _outcome_cuts(policy, spec, layer.mesh))


def _inputs_cuts(layer: DecoderLayer) -> tuple:
    """Returns how a layer, its keys and queries, the lengths and what earlier layers pass on are cut for a mesh."""
    return module_cuts(layer), KEYS, QUERIES, WHOLE, ORDER


def _outcome(
    layer: DecoderLayer, keys: Keys, queries: Queries, lengths: jax.Array, shared: Shared | None, *,
    policy: CachePolicy, spec: CacheSpec,
) -> Outcome:  # fmt: skip
    heads = Heads(queries.q, *map(by_head, keys), lengths, layer.scoring)
    return prefill_outcome(layer, heads, queries.attended, shared, policy=policy, spec=spec)


@functools.partial(jax.jit, static_argnames=("policy", "spec"))
def empty_outcome(
    layer: DecoderLayer, keys: Keys, queries: Queries, lengths: Int[Array, " 1"], shared: Shared | None, *,
    policy: CachePolicy, spec: CacheSpec,
) -> Outcome:  # fmt: skip
    """Returns an outcome of all 0 with the shapes of `pack`'s, for `pack_head` to fill."""

    def run(*arrays: Any) -> Outcome:
        shapes = jax.eval_shape(functools.partial(_outcome, policy=policy, spec=spec), *arrays)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    arrays = layer, keys, queries, lengths, shared
    return on_mesh(layer.mesh, run, arrays, _inputs_cuts(layer), _outcome_cuts(policy, spec, layer.mesh))


@functools.partial(jax.jit, static_argnames=("policy", "spec"), donate_argnames="outcome")
def pack_head(
    outcome: Outcome, layer: DecoderLayer, keys: Keys, queries: Queries, lengths: Int[Array, " 1"], shared: Shared | None,
    head: Int[Array, ""], *, policy: CachePolicy, spec: CacheSpec,
) -> Outcome:  # fmt: skip
    """Returns `outcome` with the outcome of one KV head in its place; donates `outcome`.

    The axis of the KV heads is where the shapes of the two outcomes differ. An array without such an axis describes the row. On
    a mesh `head` counts the KV heads of each device.
    """
    cuts, arrays = _outcome_cuts(policy, spec, layer.mesh), (outcome, layer, keys, queries, lengths, shared, head)
    run = functools.partial(_pack_head, policy=policy, spec=spec)
    return on_mesh(layer.mesh, run, arrays, (cuts, *_inputs_cuts(layer), WHOLE), cuts)


def _pack_head(
    outcome: Outcome, layer: DecoderLayer, keys: Keys, queries: Queries, lengths: jax.Array, shared: Shared | None,
    head: jax.Array, *, policy: CachePolicy, spec: CacheSpec,
) -> Outcome:  # fmt: skip
    group = spec.num_heads // spec.num_kv_heads

    def cut(x: jax.Array, axis: int, count: int = 1) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, head * count, count, axis=axis)

    keys = Keys(*(cut(x, 1) for x in keys))
    attended = Attended(*(cut(x, 2, group) for x in queries.attended))
    queries = Queries(cut(queries.q, 2, group), attended, None)
    shared = jax.tree.map(lambda x: cut(x, 1), shared)  # the order of tokens in pages, i32[1, K, T]
    spec = replace(spec, num_heads=group, num_kv_heads=1)
    part = _outcome(layer, keys, queries, lengths, shared, policy=policy, spec=spec)
    return jax.tree.map(functools.partial(_put_head, head=head), outcome, part)


def _put_head(whole: jax.Array, part: jax.Array, *, head: Any) -> jax.Array:
    axes = [axis for axis, (x, y) in enumerate(zip(whole.shape, part.shape, strict=True)) if x != y]
    return lax.dynamic_update_slice_in_dim(whole, part, head * part.shape[axes[0]], axis=axes[0]) if axes else part
