"""Rows of a batch that decodes: one is put in or taken out at any step, and a run is forked; nothing copies the pool."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from icejax.cache.pool import host_pool
from icejax.cache.pool.extents import SCRATCH_EXTENT, Extents, extents_for
from icejax.cache.protocol import KVCache, Lengths
from icejax.checks.errors import InputError
from icejax.engine.decode_step import DecodeState
from icejax.engine.plan import Plan
from icejax.engine.sampling import RowSampling, Sampling, row_keys
from icejax.runtime import devices


def empty_batch(plan: Plan) -> DecodeState:
    """Returns the state of a batch in which no row lives yet."""
    batch = plan.spec.batch_size
    none = jnp.zeros(batch, jnp.int32)
    lengths = Lengths.of(none, plan.prompt_pages)
    table = jnp.full((batch, extents_for(plan.pool.pages)), SCRATCH_EXTENT, jnp.int32) if plan.pooled else None
    layers = tuple(policy.init(plan.spec_of(i)) for i, policy in enumerate(plan.policies))
    state = DecodeState(KVCache(layers, lengths, table), none, none == 0, row_keys([(0, 0)] * batch), none)
    # Buffers of their own, as a step takes them all, and bound to the device as what it gives is.
    return jax.device_put(jax.tree.map(jnp.copy, state), devices.device())


def insert(state: DecodeState, row: DecodeState, at: int, *, plan: Plan) -> DecodeState:
    """Returns the state of a batch with a row in the place `at`, which must be free. Takes `state`.

    The row goes on as it would alone. What it puts into the pool from now on goes into pages that become full with those of
    the others; its first one holds only what came since.

    Args:
        row: a batch of one, of the capacities of `plan`, that was prefilled and has not decoded since. It may decode
            `plan.joining_tokens`.
        plan: the batch's.

    Raises:
        InputError: the row that is there has not been ended or taken out, the one that is to join has decoded, or the plan
            has no room for rows that join.
    """
    if plan.joining_tokens < 1:
        raise InputError(f"rows cannot join a batch with room for {plan.spec.new_capacity} new tokens: plan for more")
    if not bool(state.done[at]) or (plan.pooled and (np.asarray(state.cache.table[at]) != SCRATCH_EXTENT).any()):
        raise InputError(f"row {at} of the batch is taken: end it first, or take it out")
    if int(row.cache.lengths.clock):
        raise InputError("a row that has decoded cannot join a batch: take it out, settle it and put new text behind it first")
    return _insert(*_alike(state, row), jnp.int32(at), plan=plan)


@functools.partial(jax.jit, static_argnames="plan", donate_argnums=0)
def _insert(state: DecodeState, row: DecodeState, at: Int[Array, ""], *, plan: Plan) -> DecodeState:
    clock = state.cache.lengths.clock
    joining = zip(plan.policies, row.cache.layers, strict=True)
    layers = tuple(policy.joining(layer, row.cache.lengths, clock) for policy, layer in joining)
    lengths = replace(row.cache.lengths, origin=row.cache.lengths.seen - clock)
    row = replace(row, cache=replace(row.cache, layers=layers, lengths=lengths))

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new, at * len(new), axis=0)

    return _with(state, jax.tree.map(put, _by_row(state), _by_row(row)))


def extract(state: DecodeState, at: int) -> tuple[DecodeState, DecodeState]:
    """Returns the state of the batch without the row in the place `at`, and that row as a batch of one, which can go on alone.

    Its extents go with it.
    """
    return _emptied(state, at), _extract(state, jnp.int32(at))


@jax.jit
def _extract(state: DecodeState, at: Int[Array, ""]) -> DecodeState:
    batch = len(state.done)

    def taken(x: jax.Array) -> jax.Array:
        size = len(x) // batch
        return jax.lax.dynamic_slice_in_dim(x, at * size, size, axis=0)

    return _with(state, jax.tree.map(taken, _by_row(state)))


def fold_into_prompt(
    row: DecodeState, pool: jax.Array | None, extents: Extents | None, *, plan: Plan, tokens: int
) -> tuple[DecodeState, jax.Array | None]:
    """Returns a row that was taken out as if what it has decoded were of its prompt, and the pool; takes both.

    New text can be put behind it then (`extend`), after which it can join again. Its pages of new tokens move behind
    those of its prompt.

    Args:
        plan: of a batch of one.
        tokens: how many will be put behind it; room for their pages is taken.

    Raises:
        InputError: the row is then longer than the plan's prompts may be, or too few extents are free.
    """
    if not plan.pooled:
        return row, pool
    first, behind, table = plan.pooled[0], plan.prompt_pages, np.array(row.cache.table)
    counts = np.asarray(plan.policies[first].counts(row.cache.layers[first]))[0, 0]
    used = int(np.flatnonzero(counts[:behind]).max(initial=-1)) + 1
    # From the oldest on: they are filled over and over.
    ids = behind + (int(row.cache.lengths.next_page) - behind + np.arange(plan.growth_pages)) % plan.growth_pages
    there = counts[ids] > 0
    ids, count = np.concatenate([ids[there], ids[~there]]), int(there.sum())
    end = used + count + plan.padded(tokens) // plan.page_size
    if end > behind:
        raise InputError(f"a row of {end} pages does not fit prompts of at most {behind}: plan for longer prompts")
    # Own ones to write to: where it has none yet, and where a fork reads them too.
    touched = (np.arange(table.shape[1]) >= used // host_pool.EXTENT) & (np.arange(table.shape[1]) < extents_for(end))
    pool, table = _owned(pool, table, touched & ((table == SCRATCH_EXTENT) | extents.shared(table)), extents)
    row, there = replace(row, cache=replace(row.cache, table=table)), jnp.arange(len(ids)) < count
    pages, layers = _moving(row.cache, pool, jnp.asarray(ids, jnp.int32), there, jnp.int32(used), plan=plan)
    pool = host_pool.write_pages(pool, pages, table, jnp.int32(used))
    lengths = replace(row.cache.lengths, next_page=jnp.int32(used + count))
    return replace(row, cache=KVCache(layers, lengths, table)), pool


@functools.partial(jax.jit, static_argnames="plan")
def _moving(cache: KVCache, pool: jax.Array, ids: jax.Array, there: jax.Array, first: jax.Array, *, plan: Plan):
    """Returns pages [M, L, 1, K, planes, p, W] of all layers, and the states of the layers once they are at page `first`."""
    states, pages = list(cache.layers), []
    for i in plan.pooled:
        pages.append(plan.pages(i, pool, cache.table).run(jnp.int32(plan.prompt_pages), len(ids))[ids - plan.prompt_pages])
        states[i] = plan.policies[i].after_move(states[i], ids, there, first, behind=plan.prompt_pages)
    return jnp.stack(pages, axis=1), tuple(states)


def end(state: DecodeState, at: int, extents: Extents) -> DecodeState:
    """Returns the state in which the row in the place `at` has ended, and gives its extents back."""
    if state.cache.table is not None:
        extents.give_back(np.asarray(state.cache.table[at]))
    return _emptied(state, at)


def _emptied(state: DecodeState, at: int) -> DecodeState:
    table = state.cache.table
    table = None if table is None else table.at[at].set(SCRATCH_EXTENT)
    return replace(state, cache=replace(state.cache, table=table), done=state.done.at[at].set(True))


def fork(
    state: DecodeState, pool: jax.Array | None, extents: Extents | None, *, plan: Plan
) -> tuple[DecodeState, jax.Array | None]:
    """Returns a second state that goes on from `state` in its own way, and the pool; takes the pool.

    The two share the extents of their prompts, which are counted, and the pool, which is to be handed to whichever takes its
    step, as the other left it. Extents of new tokens are copied: both fill them over and over. A row that samples draws alike
    in both until one has another `key`.

    Args:
        extents: of the pool; that of nobody's must be among them.

    Raises:
        InputError: too few extents are free.
    """
    twin = jax.tree.map(jnp.copy, state)
    if not plan.pooled:
        return twin, pool
    table = np.array(state.cache.table)
    mine = (np.arange(table.shape[1]) >= plan.prompt_pages // host_pool.EXTENT) & (table != SCRATCH_EXTENT)
    extents.share(table)
    pool, table = _owned(pool, table, mine, extents)
    return replace(twin, cache=replace(twin.cache, table=table)), pool


def _owned(pool: jax.Array, table: np.ndarray, wanted: np.ndarray, extents: Extents) -> tuple[jax.Array, Int[Array, "B X"]]:
    """Returns the pool, and the table with extents of its own where they are `wanted`; they hold what those before did."""
    own = np.where(wanted, extents.take(wanted), table)
    for old, new in zip(table[wanted], own[wanted], strict=True):
        if old != SCRATCH_EXTENT:
            pool = host_pool.write_extent(pool, host_pool.read_extent(pool, jnp.int32(old)), jnp.int32(new))
    extents.give_back(table[wanted])
    return pool, jnp.asarray(own, jnp.int32)


def _by_row(state: DecodeState) -> tuple[Any, ...]:
    """Returns what has rows, or rows and KV heads, as its first axis."""
    cache = state.cache
    own = state.last_tokens, state.done, state.key, state.draw_origin, state.sampling, state.seen
    return cache.layers, cache.lengths.origin, cache.table, *own


def _with(state: DecodeState, rows: tuple[Any, ...]) -> DecodeState:
    """Returns a state with others of `_by_row`."""
    layers, origin, table, *own = rows
    return DecodeState(KVCache(layers, replace(state.cache.lengths, origin=origin), table), *own)


def _alike(*states: DecodeState) -> list[DecodeState]:
    """Returns states that all say how their rows sample, and what their texts hold, if one does."""
    sampling = [x.sampling for x in states if x.sampling is not None]
    samples = any(x.samples for x in sampling)
    vocabulary = [x.seen.shape[1] for x in states if x.seen is not None]
    completed = []
    for state in states:
        own, seen = state.sampling, state.seen
        if sampling:
            own = replace(own or RowSampling.of([Sampling()] * len(state.done)), samples=samples)
        if vocabulary and seen is None:
            seen = jnp.zeros((len(state.done), vocabulary[0]), bool)
        completed.append(replace(state, sampling=own, seen=seen))
    return completed
