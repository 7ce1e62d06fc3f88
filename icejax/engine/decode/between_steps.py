"""The programs between decode steps that change the pool: pages of the window go to it, and its newest pages are packed again.

`step.DecodePrograms` calls them. With pages of 8 tokens and `compact_every=32`, after steps 8, 16, 24 and 32 `flush`
writes the window's oldest page to the pool, and after step 32 `compact` packs the newest 32 / 8 = 4 pages again.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from icejax.cache.pool import host_pool
from icejax.cache.pool.host_pool import NewPages, Pool
from icejax.cache.pool.page_format import without_codes
from icejax.cache.protocol import KVCache, View
from icejax.engine.plan import Plan
from icejax.runtime.mesh import WHOLE, on_mesh, result_cuts


def _flushed_pages(cache: KVCache, plan: Plan) -> list[tuple[Any, Any]]:
    """Returns the result of `flush` for every pooled layer.

    Layers with equal policies and shapes run in one call, as rows of it: 3 such layers of 2 rows are 6 rows.
    """
    states = {i: plan.policies[i].flush_slice(cache.layers[i], cache.lengths) for i in plan.pooled}
    groups: dict[Any, list[int]] = {}
    for i, state in states.items():
        leaves, tree = jax.tree.flatten(state)
        groups.setdefault((plan.policies[i], tree, *((x.shape, x.dtype) for x in leaves)), []).append(i)
    results = {}
    for (policy, *_), layers in groups.items():
        joined = jax.tree.map(lambda *x: jnp.concatenate(x), *(states[i] for i in layers))
        rows, origin = len(cache.lengths.origin), jnp.tile(cache.lengths.origin, len(layers))
        flushed = policy.flush(joined, dataclasses.replace(cache.lengths, origin=origin))
        for group, i in enumerate(layers):
            results[i] = jax.tree.map(lambda x, group=group, rows=rows: x[group * rows : (group + 1) * rows], flushed)
    return [results[i] for i in plan.pooled]


@functools.lru_cache(maxsize=16)
def between_steps(plan: Plan):
    """Returns the programs `flush`, `flushed` and `compact`.

    `flush` returns the pages that leave the window, what changes in the layers' states, and the first page to write. `flushed`
    returns the cache after it. `compact` returns the cache, pages for the pool, and the first page to write. The last two
    donate the cache.
    """

    def leaving(cache: KVCache) -> tuple[NewPages, list, jax.Array]:
        pages, updates = zip(*_flushed_pages(cache, plan), strict=True)
        return jax.tree.map(lambda *x: jnp.stack(x)[None], *pages), list(updates), cache.lengths.next_page

    def updated(cache: KVCache, updates: list) -> KVCache:
        states = list(cache.layers)
        for i, update in zip(plan.pooled, updates, strict=True):
            states[i] = plan.policies[i].after_flush(states[i], update, cache.lengths)
        next_page = cache.lengths.next_page + 1
        # The pages for new tokens are a ring: with 32 prompt pages of 64, page 63 is followed by page 32.
        next_page = jnp.where(next_page < plan.pool.pages, next_page, plan.prompt_pages)
        return KVCache(tuple(states), dataclasses.replace(cache.lengths, next_page=next_page), cache.table)

    def packed_anew(cache: KVCache, pool: Pool) -> tuple[KVCache, NewPages, jax.Array]:
        states, packed, shared = list(cache.layers), [], None
        count = plan.compact_every // plan.page_size
        # Where the ring has just wrapped, the newest pages are the last ones of the pool.
        end = jnp.where(cache.lengths.next_page == plan.prompt_pages, plan.pool.pages, cache.lengths.next_page)
        first, lengths = end - count, dataclasses.replace(cache.lengths, next_page=end)
        for i in plan.pooled:
            newest = plan.pages(i, without_codes(pool), cache.table).run(first, count)
            outcome = plan.policies[i].compact(states[i], newest, View(lengths, shared=shared))
            states[i], shared = outcome.state, outcome.shared or shared
            packed.append(outcome.pages)
        return KVCache(tuple(states), cache.lengths, cache.table), jax.tree.map(lambda *x: jnp.stack(x, axis=1), *packed), first

    @jax.jit
    def flush(cache: KVCache) -> tuple[NewPages, list, jax.Array]:
        return on_mesh(plan.mesh, leaving, (cache,), (plan.cuts,))

    @functools.partial(jax.jit, donate_argnums=0)
    def flushed(cache: KVCache, updates: list) -> KVCache:
        of_updates = WHOLE if plan.mesh is None else result_cuts(plan.mesh, leaving, (cache,), (plan.cuts,))[1]
        return on_mesh(plan.mesh, updated, (cache, updates), (plan.cuts, of_updates), plan.cuts)

    @functools.partial(jax.jit, donate_argnums=0)
    def compact(cache: KVCache, pool: Pool) -> tuple[KVCache, NewPages, jax.Array]:
        cuts = plan.cuts, host_pool.BY_HEAD
        return on_mesh(plan.mesh, packed_anew, (cache, pool), cuts, (*cuts, WHOLE))

    return flush, flushed, compact
