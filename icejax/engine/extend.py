"""Extend: runs more text after the cache of one row, layer by layer; the text attends exactly to all earlier tokens.

`Session` calls `extend` for every text after the first. `serving.start` makes an `ExtendJob` for text after a cached prefix:
other rows may decode between its layers. Through the layers goes [1, T, D], T being the padded text.

Example: a row of 100 tokens and 5 new ones: these have positions 100-104, and the row then has 105 tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
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
    job = ExtendJob(model, tokens, plan, state)
    while not job.done:
        pool = job.advance(pool)
        if progress is not None:
            job.hidden.block_until_ready()
            progress(job.layers_done)
    return *job.result(), pool


class ExtendJob:
    """More text after the cache of one row, layer by layer: ``while not job.done: pool = job.advance(pool)``.

    Other rows may decode between two layers.

    Attributes:
        done: whether all layers have run.
        layers_done: number of layers that have run.
        hidden: the output of the last of them over the padded text, cut as by `layers.embed`; None before the first.
    """

    def __init__(self, model: CausalLM, tokens: Sequence[int], plan: Plan, state: DecodeState) -> None:
        """Prepares the layers; nothing runs yet. `advance` donates the arrays of `state`."""
        self._model, self._tokens, self._plan, self._state = model, tokens, plan, state
        self._new, self._used, self._states = jnp.asarray([len(tokens)], jnp.int32), jnp.int32(0), list[Any]()
        self._pool: Pool | None = None
        self.hidden: jax.Array | None = None
        self._layers = self._walk()

    @property
    def layers_done(self) -> int:
        """Number of layers that have run."""
        return len(self._states)

    @property
    def done(self) -> bool:
        """Whether all layers have run."""
        return self.layers_done == len(self._model.model.layers)

    def advance(self, pool: Pool | None) -> Pool | None:
        """Runs the next layer and returns the pool, which a layer that writes pages donates."""
        self._pool, number = pool, self.layers_done
        self.hidden, (layer_state, pages, filled) = next(self._layers)
        self._pool = None
        self._states.append(layer_state)
        if pages is not None:
            self.hidden.block_until_ready()  # the layer's program reads the pool that the next lines donate
            cache, pages = self._state.cache, jax.tree.map(lambda x: x[:, None], pages)
            place, self._used = (cache.lengths.next_page, self._plan.pooled.index(number)), filled
            pool = host_pool.write_pages(pool, pages, cache.table, *place, mesh=self._plan.mesh)
        return pool

    def result(self) -> tuple[DecodeState, Step]:
        """Returns the state to decode from and the first step, as `prefill` does; called after the last layer."""
        state, lengths = self._state, self._state.cache.lengths
        after = Lengths.of(lengths.seen + self._new, lengths.next_page + self._used)
        penalties = None if state.penalties is None else state.penalties.behind(self._tokens)
        cache, draw_origin = KVCache(tuple(self._states), after, state.cache.table), jnp.copy(after.seen)
        options = dict(draw_origin=draw_origin, penalties=penalties)
        state = dataclasses.replace(state, cache=cache, done=draw_origin < 0, **options)
        return choose_first(self._model, self.hidden, self._new, state, self._plan)

    def _walk(self) -> Iterator[tuple[jax.Array, tuple]]:
        padded = np.zeros((1, text_bucket(len(self._tokens))), np.int32)
        padded[0, : len(self._tokens)] = self._tokens
        yield from run_layers(self._model, embed(self._model, jnp.asarray(padded)), self._run)

    def _run(self, layer: DecoderLayer, x: jax.Array, place: LayerPlace):
        i, cache = place.number, self._state.cache
        pages = self._plan.pages(i, self._pool, cache.table)  # the pool already has the earlier layers' new pages
        layer = with_experts_on_device(layer)
        sizes = dict(policy=self._plan.policies[i], spec=self._plan.spec_of(i))
        return _extend_layer(layer, x, cache.lengths, self._new, cache.layers[i], pages, place.shared, **sizes)


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
