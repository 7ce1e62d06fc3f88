"""Extend: runs more text after the cache of one row, layer by layer; the text attends exactly to all earlier tokens.

`Session` calls it for every text after the first, `serving.start` for text after a cached prefix. Through the layers goes
[1, T, D], T being the padded text.

Example: a row of 100 tokens and 5 new ones: these have positions 100-104, and the row then has 105 tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.pool import host_pool
from icejax.cache.pool.host_pool import Pool, PoolLayer
from icejax.cache.protocol import CachePolicy, Heads, KVCache, Lengths, Shared
from icejax.cache.shares import ORDER, PAGES, state_cuts
from icejax.cache.sizes import CacheSpec
from icejax.engine.buckets import text_bucket
from icejax.engine.decode.layer import view_of
from icejax.engine.decode.state import DecodeState, Step
from icejax.engine.first_token import choose_first
from icejax.engine.layers import LayerPlace, embed, run_layers
from icejax.engine.plan import Plan
from icejax.models.decoder import CausalLM, DecoderLayer
from icejax.models.sharding import module_cuts
from icejax.ops.experts.offloaded_experts import with_experts_on_device
from icejax.runtime.mesh import WHOLE, on_mesh, stream_cut, stream_parts


def extend(
    model: CausalLM, tokens: Sequence[int], plan: Plan, state: DecodeState, pool: Pool | None, *,
    progress: Callable[[int], None] | None = None,
) -> tuple[DecodeState, Step, Pool | None]:  # fmt: skip
    """Appends `tokens` to a cache of one row and chooses the next token. Donates `state` and `pool`.

    Returns what `prefill` returns: the state to decode from, the first step, and the pool. The earlier tokens' pages are read
    from the pool block by block.

    Assumes that the pool has room for the tokens (`Plan.room_for_answer`).

    Args:
        progress: called with the number of layers done.
    """
    padded = np.zeros((1, text_bucket(len(tokens))), np.int32)
    padded[0, : len(tokens)] = tokens
    lengths, table, new = state.cache.lengths, state.cache.table, jnp.asarray([len(tokens)], jnp.int32)
    states, used = [], jnp.int32(0)

    def run(layer: DecoderLayer, x: jax.Array, place: LayerPlace):
        i, pages = place.number, plan.pages(place.number, pool, table)  # `pool` already has the earlier layers' new pages
        layer = with_experts_on_device(layer)
        sizes = dict(policy=plan.policies[i], spec=plan.spec_of(i))
        return _extend_layer(layer, x, lengths, new, state.cache.layers[i], pages, place.shared, **sizes)

    for i, (x, (layer_state, pages, filled)) in enumerate(run_layers(model, embed(model, jnp.asarray(padded)), run)):
        states.append(layer_state)
        if pages is not None:
            x.block_until_ready()  # the layer's program reads the pool that the next line donates
            pages = jax.tree.map(lambda x: x[:, None], pages)
            place, used = (lengths.next_page, plan.pooled.index(i)), filled
            pool = host_pool.write_pages(pool, pages, table, *place, mesh=plan.mesh)
        if progress is not None:
            x.block_until_ready()
            progress(i + 1)
    lengths = Lengths.of(lengths.seen + new, lengths.next_page + used)
    penalties = None if state.penalties is None else state.penalties.behind(tokens)
    cache, draw_origin = KVCache(tuple(states), lengths, table), jnp.copy(lengths.seen)
    options = dict(draw_origin=draw_origin, penalties=penalties)
    state = dataclasses.replace(state, cache=cache, done=draw_origin < 0, **options)
    return *choose_first(model, x, new, state, plan), pool


@functools.partial(jax.jit, static_argnames=("policy", "spec"), donate_argnums=(1, 4))
def _extend_layer(
    layer: DecoderLayer, x: jax.Array, lengths: Lengths, new: jax.Array, state: Any, pages: PoolLayer | None,
    shared: Shared | None, *, policy: CachePolicy, spec: CacheSpec,
):  # fmt: skip
    def run(layer: DecoderLayer, x: jax.Array, lengths: Lengths, new: jax.Array, state: Any, pages: PoolLayer | None, shared):
        positions = lengths.seen[:, None] + jnp.arange(x.shape[1] * stream_parts(layer.mesh), dtype=jnp.int32)[None, :]
        seen = lengths.seen + new
        heads = Heads(*layer.enter(x, positions, seen)[:3], new, layer.scoring)
        outcome = policy.extend(state, heads, view_of(layer, lengths, seen, pages, shared))
        return layer.leave(x, outcome.attended)[0], (outcome.state, outcome.pages, outcome.used), outcome.shared or shared

    of_state, of_pages = state_cuts(policy, spec, layer.mesh), None if pages is None else pages.cuts
    stream = stream_cut(layer.mesh)
    cuts = module_cuts(layer), stream, WHOLE, WHOLE, of_state, of_pages, ORDER
    arrays = layer, x, lengths, new, state, pages, shared
    return on_mesh(layer.mesh, run, arrays, cuts, (stream, (of_state, PAGES, WHOLE), ORDER))
