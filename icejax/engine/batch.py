"""Rows of a decoding batch: between steps a row is inserted, taken out, ended, moved or forked; the pool is never copied whole.

`DecodeState` holds B rows, and a row by itself is a batch of one. The pool has no batch axis: each row owns extents of it,
listed in its row of `KVCache.table`, i32[B, X]. The core and the decode loop insert rows, take them out and free
their places; benchmarks and tests also fork and fold rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from icejax.cache.pool import host_pool
from icejax.cache.pool.extents import SCRATCH_EXTENT, Extents, extents_for
from icejax.cache.pool.host_pool import Pool
from icejax.cache.protocol import KVCache, Lengths
from icejax.checks.errors import InputError
from icejax.engine.decode.state import DecodeState, Step, decode_cuts
from icejax.engine.penalties import neutral_where_none
from icejax.engine.plan import Plan
from icejax.engine.sampling import RowSampling, Sampling, row_keys
from icejax.runtime import heap
from icejax.runtime.mesh import WHOLE, Mesh, home, on_mesh, placed


def empty_batch(plan: Plan) -> DecodeState:
    """Returns the state of a batch whose places are all free."""
    batch = plan.spec.batch_size
    zeros = jnp.zeros(batch, jnp.int32)
    lengths = Lengths.of(zeros, plan.prompt_pages)
    table = jnp.full((batch, extents_for(plan.pool.pages)), SCRATCH_EXTENT, jnp.int32) if plan.pooled else None
    state = DecodeState(KVCache((), lengths, table), zeros, zeros == 0, row_keys([(0, 0)] * batch), zeros)
    # A step donates every array, so no two share a buffer; its results are committed to the device, so these are too.
    state = jax.tree.map(lambda x: placed(plan.mesh, jnp.copy(x)), state)
    return replace(state, cache=replace(state.cache, layers=_empty_layers(plan)))


def _empty_layers(plan: Plan) -> tuple[Any, ...]:
    def init() -> tuple[Any, ...]:
        return tuple(policy.init(plan.spec_of(i)) for i, policy in enumerate(plan.policies))

    if plan.mesh is None:
        return jax.tree.map(lambda x: jax.device_put(jnp.copy(x), home(None)), init())
    return jax.jit(lambda: on_mesh(plan.mesh, init, (), (), plan.cuts.layers))()


def insert(state: DecodeState, row: DecodeState, at: int, *, plan: Plan) -> DecodeState:
    """Returns the state of a batch with `row` in the free place `at`. Donates `state`.

    The row decodes the same tokens as it would alone. Its pages of new tokens become full at the same steps as the other rows'
    pages, so its first page holds only the tokens since it joined.

    Example: a row of 100 tokens that joins at clock 40 gets the origin 100 - 40 = 60; its length stays 60 + 40 = 100.

    Args:
        row: a batch of one with the capacities of `plan`, prefilled and not decoded since. It may decode
            `plan.joining_tokens` tokens.
        plan: the batch's plan.

    Raises:
        InputError: the place is not free, the row has decoded, or the batch has decoded and its plan has no room for rows that
            join.
    """
    if plan.joining_tokens < 1 and int(state.cache.lengths.clock):
        raise InputError(f"rows cannot join a batch with room for {plan.spec.new_capacity} new tokens: plan for more")
    if not bool(state.done[at]) or (plan.pooled and (np.asarray(state.cache.table[at]) != SCRATCH_EXTENT).any()):
        raise InputError(f"row {at} of the batch is taken: end it first, or take it out")
    if int(row.cache.lengths.clock):
        raise InputError("a row that has decoded cannot join a batch: extract it, call fold_into_prompt and extend it first")
    return _insert(*_with_same_fields(state, row, plan=plan), jnp.int32(at), plan=plan)


@functools.partial(jax.jit, static_argnames="plan", donate_argnums=0)
def _insert(state: DecodeState, row: DecodeState, at: Int[Array, ""], *, plan: Plan) -> DecodeState:
    cuts = decode_cuts(plan)
    return on_mesh(plan.mesh, functools.partial(_inserted, plan=plan), (state, row, at), (cuts, cuts, WHOLE), cuts)


def _inserted(state: DecodeState, row: DecodeState, at: Int[Array, ""], *, plan: Plan) -> DecodeState:
    clock = state.cache.lengths.clock
    pairs = zip(plan.policies, row.cache.layers, strict=True)
    layers = tuple(policy.joining(layer, row.cache.lengths, clock) for policy, layer in pairs)
    lengths = replace(row.cache.lengths, origin=row.cache.lengths.seen - clock)
    row = replace(row, cache=replace(row.cache, layers=layers, lengths=lengths))

    def put(batch_array: jax.Array, row_array: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(batch_array, row_array, at * len(row_array), axis=0)

    return _with_row_arrays(state, jax.tree.map(put, _row_arrays(state), _row_arrays(row)))


def extract(state: DecodeState, at: int) -> tuple[DecodeState, DecodeState]:
    """Returns the batch without the row in the place `at`, and that row as a batch of one, which can decode alone.

    The row keeps its extents.
    """
    return without_row(state, at), _extract(state, jnp.int32(at))


@jax.jit
def _extract(state: DecodeState, at: Int[Array, ""]) -> DecodeState:
    batch = len(state.done)

    def row_of(x: jax.Array) -> jax.Array:
        size = len(x) // batch
        return jax.lax.dynamic_slice_in_dim(x, at * size, size, axis=0)

    return _with_row_arrays(state, jax.tree.map(row_of, _row_arrays(state)))


def resized(state: DecodeState, step: Step, places: Sequence[int], size: int) -> tuple[DecodeState, Step]:
    """Returns the batch with `size` places, of which the first have the rows of `places`, in that order, and its newest step.

    The other places are free. Deletes the arrays of `state` one by one: no more than one is there in both sizes. The arrays of
    the first rows alone, cut from a larger state in each step, would be copied in each step.

    Assumes one device.
    """
    batch, order = len(state.done), np.zeros(size, np.int32)
    order[: len(places)] = places

    def moved(x: jax.Array) -> jax.Array:
        rows = jax.block_until_ready(_rows(x, order, batch=batch))
        x.delete()
        return rows

    state, free = _with_row_arrays(state, jax.tree.map(moved, _row_arrays(state))), np.arange(size) >= len(places)
    table = state.cache.table
    table = None if table is None else jnp.where(free[:, None], SCRATCH_EXTENT, table)
    heap.give_back()  # the C library finds no room for such arrays in freed ones: each move would add a copy of the cache
    return replace(state, cache=replace(state.cache, table=table), done=state.done | free), _step_rows(step, order)


# Unused arguments are kept, or the rows of an empty array would not be committed, and the next step would compile twice.
@functools.partial(jax.jit, static_argnames="batch", keep_unused=True)
def _rows(x: jax.Array, order: Int[Array, " R"], *, batch: int) -> jax.Array:
    """Returns the rows in `order` of an array whose first axis is `batch` rows, or rows and KV heads."""
    each = len(x) // batch
    return x.reshape(batch, each, *x.shape[1:])[order].reshape(len(order) * each, *x.shape[1:])


@jax.jit
def _step_rows(step: Step, order: Int[Array, " R"]) -> Step:
    return Step(step.counters[:, order], step.logits[order])


def fold_into_prompt(
    row: DecodeState, pool: Pool | None, extents: Extents | None, *, plan: Plan, tokens: int
) -> tuple[DecodeState, Pool | None]:
    """Returns an extracted row with its decoded tokens counted as prompt, and the pool.

    Donates the pool; the old row must not be used again.
    The row's pages of decoded tokens move behind the pages of its prompt. Then `extend` can add text and `insert` can put the
    row into a batch again.

    Example: a plan has 96 prompt pages. The row's prompt fills pages 0-19, its decoded tokens fill pages 96-98. These move to
    pages 20-22, and the next page is 23.

    Args:
        plan: the plan of a batch of one.
        tokens: number of tokens that `extend` will add; extents for their pages are taken now.

    Raises:
        InputError: the row becomes longer than the plan's prompts may be, or too few extents are free.
    """
    if not plan.pooled:
        return row, pool
    prompt_pages, table = plan.prompt_pages, np.array(row.cache.table)
    counts, used = _counts(row, plan), pages_used(row, plan)
    # Oldest page first: the pages for new tokens are a ring, and `next_page` is its oldest page.
    ids = prompt_pages + (int(row.cache.lengths.next_page) - prompt_pages + np.arange(plan.growth_pages)) % plan.growth_pages
    filled = counts[ids] > 0
    ids, count = np.concatenate([ids[filled], ids[~filled]]), int(filled.sum())
    end = used + count + plan.text_slots(tokens) // plan.page_size
    if end > prompt_pages:
        raise InputError(f"a row of {end} pages does not fit prompts of at most {prompt_pages}: plan for longer prompts")
    # The row takes a new extent where it has none yet, and where a fork shares the one it has.
    touched = (np.arange(table.shape[1]) >= used // host_pool.EXTENT) & (np.arange(table.shape[1]) < extents_for(end))
    taken = touched & ((table == SCRATCH_EXTENT) | extents.shared(table))
    pool, table = _with_own_extents(pool, table, taken, extents, mesh=plan.mesh)
    row, moved_mask = replace(row, cache=replace(row.cache, table=table)), jnp.arange(len(ids)) < count
    pages, layers = _moved_pages(row.cache, pool, jnp.asarray(ids, jnp.int32), moved_mask, jnp.int32(used), plan=plan)
    pool = host_pool.write_pages(pool, pages, table, jnp.int32(used))
    lengths = replace(row.cache.lengths, next_page=jnp.int32(used + count))
    return replace(row, cache=KVCache(layers, lengths, table)), pool


def pages_used(row: DecodeState, plan: Plan) -> int:
    """Returns the number of prompt pages of one row up to the last that holds tokens."""
    return int(np.flatnonzero(_counts(row, plan)[: plan.prompt_pages]).max(initial=-1)) + 1


def _counts(row: DecodeState, plan: Plan) -> Int[np.ndarray, " P"]:
    first = plan.pooled[0]
    return np.asarray(plan.policies[first].counts(row.cache.layers[first]).addressable_data(0))[0, 0]


@functools.partial(jax.jit, static_argnames="plan")
def _moved_pages(cache: KVCache, pool: Pool, ids: jax.Array, mask: jax.Array, first: jax.Array, *, plan: Plan):
    """Returns the pages `ids` of all layers, [M, L, 1, K, planes, p, W], and the layers' states after the move to `first`.

    Args:
        mask: bool[M], pages that hold tokens.
    """
    states, pages = list(cache.layers), []
    for i in plan.pooled:
        growth = plan.pages(i, pool, cache.table).run(jnp.int32(plan.prompt_pages), len(ids))
        pages.append(jax.tree.map(lambda x: x[ids - plan.prompt_pages], growth))
        states[i] = plan.policies[i].after_move(states[i], ids, mask, first, behind=plan.prompt_pages)
    return jax.tree.map(lambda *x: jnp.stack(x, axis=1), *pages), tuple(states)


def end(state: DecodeState, at: int, extents: Extents) -> DecodeState:
    """Returns the state with the place `at` free, and gives the row's extents back."""
    if state.cache.table is not None:
        extents.give_back(np.asarray(state.cache.table[at]))
    return without_row(state, at)


def without_row(state: DecodeState, at: int) -> DecodeState:
    """Returns the state with the place `at` free; the row's extents stay taken."""
    table, lengths = state.cache.table, state.cache.lengths
    table = None if table is None else table.at[at].set(SCRATCH_EXTENT)
    # A free place counts as empty: caches that read the slots in use read those of the longest row.
    lengths = replace(lengths, origin=lengths.origin.at[at].set(-lengths.clock))
    return replace(state, cache=replace(state.cache, table=table, lengths=lengths), done=state.done.at[at].set(True))


def fork(state: DecodeState, pool: Pool | None, extents: Extents | None, *, plan: Plan) -> tuple[DecodeState, Pool | None]:
    """Returns a copy of `state` that decodes independently of it, and the pool. Donates the pool.

    The two states share one pool: pass the pool that a step of one state returned to the next step of the other.
    They share the extents of their prompts, each of which then counts one more user. Extents of new tokens are copied, because
    both states write to them. A row that samples draws the same tokens in both states until one gets another `key`.

    Args:
        extents: the pool's extents, with `SCRATCH_EXTENT` reserved.

    Raises:
        InputError: too few extents are free.
    """
    twin = jax.tree.map(jnp.copy, state)
    if not plan.pooled:
        return twin, pool
    table = np.array(state.cache.table)
    growth = (np.arange(table.shape[1]) >= plan.prompt_pages // host_pool.EXTENT) & (table != SCRATCH_EXTENT)
    extents.share(table)
    pool, table = _with_own_extents(pool, table, growth, extents, mesh=plan.mesh)
    return replace(twin, cache=replace(twin.cache, table=table)), pool


def _with_own_extents(
    pool: Pool, table: np.ndarray, wanted: np.ndarray, extents: Extents, *, mesh: Mesh | None
) -> tuple[Pool, Int[Array, "B X"]]:
    """Returns the pool, and the table with new extents at the `wanted` places, which get the contents of the old ones."""
    new_table = np.where(wanted, extents.take(wanted), table)
    for old, new in zip(table[wanted], new_table[wanted], strict=True):
        if old != SCRATCH_EXTENT:
            bits = host_pool.read_extent(pool, jnp.int32(old), mesh=mesh)
            pool = host_pool.write_extent(pool, bits, jnp.int32(new), mesh=mesh)
    extents.give_back(table[wanted])
    return pool, jnp.asarray(new_table, jnp.int32)


def _row_arrays(state: DecodeState) -> tuple[Any, ...]:
    """Returns the arrays whose first axis is rows, or rows and KV heads."""
    cache = state.cache
    fields = state.last_tokens, state.done, state.key, state.draw_origin, state.sampling, state.penalties
    return cache.layers, cache.lengths.origin, cache.table, *fields


def _with_row_arrays(state: DecodeState, arrays: tuple[Any, ...]) -> DecodeState:
    """Returns the state with `arrays` in the place of its own, in the order of `_row_arrays`."""
    layers, origin, table, *fields = arrays
    return DecodeState(KVCache(layers, replace(state.cache.lengths, origin=origin), table), *fields)


def _with_same_fields(*states: DecodeState, plan: Plan) -> list[DecodeState]:
    """Returns the states with the same arrays of `sampling` and `penalties`; a row is greedy where its state had none."""
    sizes = [len(state.done) for state in states]
    samplings = [state.sampling for state in states]
    if any(sampling is not None for sampling in samplings):
        samplings = [x or RowSampling.of([Sampling()] * size) for x, size in zip(samplings, sizes, strict=True)]
    penalties = neutral_where_none([state.penalties for state in states], sizes)
    # Committed as a step's results are, or what takes them compiles twice.
    samplings, penalties = placed(plan.mesh, (samplings, penalties))
    options = zip(states, samplings, penalties, strict=True)
    return [replace(state, sampling=sampling, penalties=penalty) for state, sampling, penalty in options]
