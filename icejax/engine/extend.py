"""More text behind a cache of one row, a layer at a time: it attends exactly to all before it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.pool import host_pool
from icejax.cache.protocol import CachePolicy, Heads, KVCache, Lengths
from icejax.engine.decode_step import DecodeState, Step, view_of
from icejax.engine.first_token import choose_first
from icejax.engine.layers import LayerPlace, embed, run_layers
from icejax.engine.plan import Plan
from icejax.engine.sampling import fold_in
from icejax.models.decoder import CausalLM, DecoderLayer
from icejax.ops.experts.offloaded_experts import with_experts_on_device
from icejax.runtime import devices


def extend(
    model: CausalLM, tokens: Sequence[int], plan: Plan, state: DecodeState, pool: jax.Array | None, *,
    progress: Callable[[int], None] | None = None,
) -> tuple[DecodeState, Step, jax.Array | None]:  # fmt: skip
    """Puts more tokens behind those of a cache of one row and chooses the next, as `prefill` does; takes state and pool.

    The new tokens attend exactly to all before them, whose pages are read from the pool block by block. The caller sees to
    it that the pool has room: `Plan.room_for_answer`. `progress` is called with the number of layers done.
    """
    padded = np.zeros((1, plan.padded(len(tokens))), np.int32)
    padded[0, : len(tokens)] = tokens
    lengths, table, new = state.cache.lengths, state.cache.table, jnp.asarray([len(tokens)], jnp.int32)
    # What a layer gives is bound to the device, as the pool is: so must the first input be, or a layer is compiled twice.
    first = jax.device_put(embed(model, jnp.asarray(padded)), devices.device())
    states, used = [], jnp.int32(0)

    def run(layer: DecoderLayer, x: jax.Array, at: LayerPlace):
        i, pages = at.number, plan.pages(at.number, pool, table)  # of the pool with the pages of the layers before
        layer = with_experts_on_device(layer)
        return _extend_layer(layer, x, lengths, new, state.cache.layers[i], pages, at.shared, policy=plan.policies[i])

    for i, (x, (layer_state, pages, filled)) in enumerate(run_layers(model, first, run)):
        states.append(layer_state)
        if pages is not None:
            x.block_until_ready()  # it reads the pool that is written now
            pool, used = host_pool.write_pages(pool, pages[:, None], table, lengths.next_page, plan.pooled.index(i)), filled
        if progress is not None:
            x.block_until_ready()
            progress(i + 1)
    lengths = Lengths.of(lengths.seen + new, lengths.next_page + used)
    seen = None if state.seen is None else state.seen.at[0, jnp.asarray(tokens)].set(True)
    cache, key = KVCache(tuple(states), lengths, table), fold_in(state.key, lengths.seen)
    began = jnp.copy(lengths.seen)
    state = dataclasses.replace(state, cache=cache, done=began < 0, key=key, draw_origin=began, seen=seen)
    return *choose_first(model, x, new, state, plan), pool


@functools.partial(jax.jit, static_argnames="policy", donate_argnums=(1, 4))
def _extend_layer(
    layer: DecoderLayer, x: jax.Array, lengths: Lengths, new: jax.Array, state, pages, shared, *, policy: CachePolicy
):
    positions = lengths.seen[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
    heads = Heads(*layer.enter(x, positions, lengths.seen + new)[:3], new, layer.scoring)
    outcome = policy.extend(state, heads, view_of(layer, lengths, pages, shared))
    return layer.leave(x, outcome.attended)[0], (outcome.state, outcome.pages, outcome.used), outcome.shared or shared
