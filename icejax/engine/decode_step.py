"""The decode step: one jitted program over all layers, which chooses the next token of every row of a batch.

The decode loop calls `DecodePrograms.step`. Through the layers goes the newest token of each row, [B, 1, D]; out come tokens
i32[B], counters i32[8, B] and logits f32[B, V].

Between steps two more programs change the pool. With pages of 8 tokens and `compact_every=32`, after steps 8, 16, 24 and 32
`flush` writes the window's oldest page to the pool, and after step 32 `compact` packs the newest 32 / 8 = 4 pages anew.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from icejax.cache.pool import host_pool
from icejax.cache.protocol import Heads, KVCache, Lengths, Report, Shared, View
from icejax.engine.counters import MILLION, NOT_FINITE, pack
from icejax.engine.layers import LayerPlace, run_layers
from icejax.engine.penalties import RowPenalties
from icejax.engine.plan import Plan
from icejax.engine.sampling import RowSampling, choose, fold_in
from icejax.models.decoder import CausalLM, DecoderLayer
from icejax.ops.experts.offloaded_experts import with_live_tokens
from icejax.runtime import compiler_options


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """All arrays that change from step to step, except the pool.

    Attributes:
        cache: the device part of the cache.
        last_tokens: the newest token of every row, not yet in the cache.
        done: rows that have ended. They repeat their last token, which callers ignore.
        key: the random key of every row.
        draw_origin: length of each row when its first token was drawn with `key`. Each draw folds the row's length less this
            origin into the key, so draws do not depend on when the row joined a batch.
        sampling: sampling options of the rows; None if all are greedy.
        penalties: penalties and logit bias of the rows; None if no row has one.
    """

    cache: KVCache
    last_tokens: jax.Array  # i32[B]
    done: jax.Array  # bool[B]
    key: jax.Array  # key[B]
    draw_origin: jax.Array  # i32[B]
    sampling: RowSampling | None = None
    penalties: RowPenalties | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """The results of a decode step.

    Attributes:
        counters: the chosen tokens and the step's counters, packed for `StepCounters.read`.
        logits: the logits that the tokens were chosen from.
    """

    counters: jax.Array  # i32[8, B]
    logits: jax.Array  # f32[B, V]

    @property
    def tokens(self) -> Int[Array, " B"]:
        """The chosen tokens, on the device."""
        return self.counters[0]

    def with_row(self, at: int, row: Step) -> Step:
        """Returns the step with the results of `row`, a step of one row, at the place `at`."""
        return Step(self.counters.at[:, at].set(row.counters[:, 0]), self.logits.at[at].set(row.logits[0]))


def choose_next(logits: jax.Array, state: DecodeState, plan: Plan) -> DecodeState:
    """Returns the state with the next token of every row that has not ended, chosen from logits f32[B, V]."""
    keys, penalties = fold_in(state.key, state.cache.lengths.seen - state.draw_origin), state.penalties
    tokens = choose(logits if penalties is None else penalties.apply(logits), state.sampling, keys=keys)
    # -1 as an index means the last token of the vocabulary; the decode loop raises before that matters.
    tokens = jnp.where(jnp.isfinite(logits).all(-1), tokens, NOT_FINITE)
    tokens = jnp.where(state.done, state.last_tokens, tokens)
    ended = jnp.isin(tokens, jnp.asarray(plan.eos_token_ids, jnp.int32)) if plan.eos_token_ids else jnp.zeros_like(state.done)
    penalties = None if penalties is None else penalties.after(tokens)
    return dataclasses.replace(state, last_tokens=tokens, done=state.done | ended, penalties=penalties)


def view_of(
    layer: DecoderLayer, lengths: Lengths, seen: Int[Array, " B"], pages: host_pool.PoolLayer | None,
    shared: Shared | None, guess=None,
) -> View:  # fmt: skip
    """Returns the view that a layer's policy gets.

    Args:
        lengths: token counts before the new tokens.
        seen: tokens of each row, the new ones included.
        pages: the layer's pages in the pool; None for a layer without pages.
        shared: what earlier layers pass on.
        guess: returns this layer's queries as projected from the previous layer's input; None if there is no guess.
    """
    return View(lengths, pages, shared, guess, lambda heads, by: layer.rerotate(heads, by, seen), layer.project)


class DecodePrograms:
    """The decode programs of one model and plan. Weights are passed flat, because walking a module takes longer than a step.

    Attributes:
        model, plan: the model and the plan.
        clock: steps taken with these programs; equal to `lengths.clock` of the state.
    """

    def __init__(self, model: CausalLM, plan: Plan) -> None:
        graph, state = nnx.split(model)
        self._leaves, tree = jax.tree.flatten(state)
        self._programs = _programs(graph, tree, plan)
        self.model, self.plan = model, plan
        self.clock = 0

    def step(self, state: DecodeState, pool: jax.Array | None) -> tuple[DecodeState, Step, jax.Array | None]:
        """Puts `last_tokens` into the cache and chooses the next tokens; returns the state, the step's results and the pool.

        Donates `state`, and also `pool` after steps that flush a window page to it.
        """
        step, flush, flushed, compact = self._programs
        state, results = step(self._leaves, state, pool)
        self.clock += 1
        if self.plan.page_size and self.clock % self.plan.page_size == 0:
            pages, updates, first = flush(state.cache)
            pool = host_pool.write_pages(pool, pages, state.cache.table, first)
            state = dataclasses.replace(state, cache=flushed(state.cache, updates))
        if self.plan.compact_every and self.clock % self.plan.compact_every == 0:
            cache, pages, first = compact(state.cache, pool)
            state, pool = dataclasses.replace(state, cache=cache), host_pool.write_pages(pool, pages, cache.table, first)
        return state, results, pool


def _mean_estimates(reports: list[Report], batch: int) -> Int[Array, "2 B"]:
    """Returns the estimated error in millionths, and tokens attended exactly, means over layers; 0 without estimates."""
    estimates = [report.estimates for report in reports if report.estimates is not None]
    if not estimates:
        return jnp.zeros((2, batch), jnp.int32)
    scale = jnp.asarray([MILLION, 1.0])[:, None]
    return jnp.clip(jnp.round(sum(estimates) / len(estimates) * scale), 0, 1e9).astype(jnp.int32)


def _expert_counts(layer: DecoderLayer, expert_ids: jax.Array | None, live: jax.Array) -> Int[Array, "2 B"]:
    """Returns the number of experts that live rows take, and the number fetched from the host for them.

    Args:
        expert_ids: i32[B, 1, k], the experts of each row's token.
    """
    if layer.offloaded is None:
        return jnp.zeros((2, len(live)), jnp.int32)
    missing = layer.offloaded.missing(expert_ids[:, 0]).sum(1, dtype=jnp.int32)
    return jnp.stack([jnp.where(live, expert_ids.shape[-1], 0), missing])


def _flushed_pages(cache: KVCache, plan: Plan) -> list[tuple[jax.Array, Any]]:
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
def _programs(graph: nnx.GraphDef, tree: jax.tree_util.PyTreeDef, plan: Plan):
    # Unused arguments are kept too: without them buffers move at every step, and a CUDA graph is updated kernel by kernel.
    @functools.partial(
        jax.jit, donate_argnums=1, keep_unused=True, compiler_options=compiler_options.OPTIONS.get(plan.platform)
    )
    def step(leaves: list[jax.Array], state: DecodeState, pool: jax.Array | None) -> tuple[DecodeState, Step]:
        # A single row always counts as live: a session continues after its end, whose eos token still enters the cache.
        ended = state.done if len(state.done) > 1 else None
        live = jnp.ones_like(state.done) if ended is None else ~ended
        model = nnx.merge(graph, with_live_tokens(jax.tree.unflatten(tree, leaves), live))
        lengths = state.cache.lengths
        positions = lengths.seen[:, None], lengths.seen + 1

        def run(layer: DecoderLayer, x: jax.Array, place: LayerPlace):
            guess = None if place.before is None else lambda: layer.enter(place.before, *positions).q
            heads = Heads(*layer.enter(x, *positions)[:3], jnp.ones_like(state.last_tokens), layer.scoring)
            pages = plan.pages(place.number, pool, state.cache.table, ended)
            view = view_of(layer, lengths, positions[1], pages, place.shared, guess)
            outcome = plan.policies[place.number].decode(state.cache.layers[place.number], heads, view)
            x, expert_ids = layer.leave(x, outcome.attended)
            return x, (outcome.state, _expert_counts(layer, expert_ids, live)), outcome.shared or place.shared

        outputs, results = zip(*run_layers(model, model.model.embed_tokens(state.last_tokens[:, None]), run), strict=True)
        states, expert_counts = zip(*results, strict=True)
        logits = model.logits(outputs[-1])[:, 0]
        cache = KVCache(states, dataclasses.replace(lengths, clock=lengths.clock + 1), state.cache.table)
        state = choose_next(logits, dataclasses.replace(state, cache=cache), plan)
        pages = jnp.zeros((3, len(state.last_tokens)), jnp.int32)
        reports = [plan.policies[i].report(states[i], cache.lengths) for i in plan.pooled]
        pages = sum((report.pages for report in reports), pages)
        estimates = _mean_estimates(reports, len(state.last_tokens))
        return state, Step(pack(state.last_tokens, pages, sum(expert_counts), estimates), logits)

    @jax.jit
    def flush(cache: KVCache) -> tuple[jax.Array, list, jax.Array]:
        pages, updates = zip(*_flushed_pages(cache, plan), strict=True)
        return jnp.stack(pages)[None], list(updates), cache.lengths.next_page

    @functools.partial(jax.jit, donate_argnums=0)
    def flushed(cache: KVCache, updates: list) -> KVCache:
        states = list(cache.layers)
        for i, update in zip(plan.pooled, updates, strict=True):
            states[i] = plan.policies[i].after_flush(states[i], update, cache.lengths)
        next_page = cache.lengths.next_page + 1
        # The pages for new tokens are a ring: with 32 prompt pages of 64, page 63 is followed by page 32.
        next_page = jnp.where(next_page < plan.pool.pages, next_page, plan.prompt_pages)
        return KVCache(tuple(states), dataclasses.replace(cache.lengths, next_page=next_page), cache.table)

    @functools.partial(jax.jit, donate_argnums=0)
    def compact(cache: KVCache, pool: jax.Array) -> tuple[KVCache, jax.Array, jax.Array]:
        states, packed, shared = list(cache.layers), [], None
        count = plan.compact_every // plan.page_size
        # Where the ring has just wrapped, the newest pages are the last ones of the pool.
        end = jnp.where(cache.lengths.next_page == plan.prompt_pages, plan.pool.pages, cache.lengths.next_page)
        first, lengths = end - count, dataclasses.replace(cache.lengths, next_page=end)
        for i in plan.pooled:
            newest = plan.pages(i, pool, cache.table).run(first, count)
            outcome = plan.policies[i].compact(states[i], newest, View(lengths, shared=shared))
            states[i], shared = outcome.state, outcome.shared or shared
            packed.append(outcome.pages)
        return KVCache(tuple(states), cache.lengths, cache.table), jnp.stack(packed, axis=1), first

    return step, flush, flushed, compact
