"""The decode step: one program over all layers, which chooses a token for every row of a batch."""

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
from icejax.engine.plan import Plan
from icejax.engine.sampling import RowSampling, choose, fold_in
from icejax.models.decoder import CausalLM, DecoderLayer
from icejax.ops.experts.offloaded_experts import with_live_tokens
from icejax.runtime import compiler_options


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """All that changes from step to step, but for the pool.

    Attributes:
        cache: the device part of the cache.
        last_tokens: the newest token of every row, not yet in the cache.
        done: rows that have ended; they go on with their last token, which is not to be read.
        key: every row's own random key.
        began: tokens of each row before the first that was chosen with it: draws are told apart by how many tokens are behind
            it, and do not depend on when the row joined a batch.
        sampling: how each row chooses its tokens; None where all take the most likely one as it is.
        seen: which tokens the text holds; None unless a row has a repetition penalty.
    """

    cache: KVCache
    last_tokens: jax.Array  # i32[B]
    done: jax.Array  # bool[B]
    key: jax.Array  # key[B]
    draw_origin: jax.Array  # i32[B]
    sampling: RowSampling | None = None
    seen: jax.Array | None = None  # bool[B, V]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """What a decode step brought.

    Attributes:
        counters: the chosen tokens and what was counted, as `StepCounters.read` takes it.
        logits: of the chosen tokens.
    """

    counters: jax.Array  # i32[8, B]
    logits: jax.Array  # f32[B, V]

    @property
    def tokens(self) -> Int[Array, " B"]:
        """The chosen tokens, on the device."""
        return self.counters[0]


def choose_next(logits: jax.Array, state: DecodeState, plan: Plan) -> DecodeState:
    """Puts the next token of every row that has not ended into the state."""
    keys = fold_in(state.key, state.cache.lengths.seen - state.draw_origin)
    tokens = choose(logits, state.sampling, keys=keys, seen=state.seen)
    # As an index it would be that of the last token; the caller is to stop before anything comes of it.
    tokens = jnp.where(jnp.isfinite(logits).all(-1), tokens, NOT_FINITE)
    tokens = jnp.where(state.done, state.last_tokens, tokens)
    ended = jnp.isin(tokens, jnp.asarray(plan.eos_token_ids, jnp.int32)) if plan.eos_token_ids else jnp.zeros_like(state.done)
    seen = state.seen
    if seen is not None:
        seen = seen.at[jnp.arange(len(tokens)), tokens].set(True)
    return dataclasses.replace(state, last_tokens=tokens, done=state.done | ended, seen=seen)


def view_of(
    layer: DecoderLayer, lengths: Lengths, pages: host_pool.PoolLayer | None, shared: Shared | None, guess=None
) -> View:
    """Returns what a layer's policy may look at."""
    return View(lengths, pages, shared, guess, layer.rerotate, layer.project)


class DecodePrograms:
    """The decode programs of one model and plan. Weights are passed flat: walking a module takes longer than a step.

    Attributes:
        model: the model.
        clock: steps since the prompt, as the state of the next step has them.
    """

    def __init__(self, model: CausalLM, plan: Plan) -> None:
        graph, state = nnx.split(model)
        self._leaves, tree = jax.tree.flatten(state)
        self._programs = _programs(graph, tree, plan)
        self.model, self._plan = model, plan
        self.clock = 0

    def step(self, state: DecodeState, pool: jax.Array | None) -> tuple[DecodeState, Step, jax.Array | None]:
        """Puts `last_tokens` into the cache and chooses the next; returns state, what the step brought, and pool.

        Donates `state`, and, when a window page is full and goes to the pool, `pool`.
        """
        step, flush, flushed, compact = self._programs
        state, brought = step(self._leaves, state, pool)
        self.clock += 1
        if self._plan.page_size and self.clock % self._plan.page_size == 0:
            pages, news, at = flush(state.cache)
            pool = host_pool.write_pages(pool, pages, state.cache.table, at)
            state = dataclasses.replace(state, cache=flushed(state.cache, news))
        if self._plan.compact_every and self.clock % self._plan.compact_every == 0:
            cache, pages, at = compact(state.cache, pool)
            state, pool = dataclasses.replace(state, cache=cache), host_pool.write_pages(pool, pages, cache.table, at)
        return state, brought, pool


def _own(reports: list[Report], batch: int) -> Int[Array, "2 B"]:
    """Returns what the policies of layers estimate of their errors, in millionths, and tokens attended exactly; 0 of none."""
    own = [report.estimates for report in reports if report.estimates is not None]
    if not own:
        return jnp.zeros((2, batch), jnp.int32)
    scale = jnp.asarray([MILLION, 1.0])[:, None]
    return jnp.clip(jnp.round(sum(own) / len(own) * scale), 0, 1e9).astype(jnp.int32)


def _experts(layer: DecoderLayer, taken: jax.Array | None, live: jax.Array) -> Int[Array, "2 B"]:
    """Returns how many experts rows that are live have taken, and how many of them came from the host."""
    if layer.hosted is None:
        return jnp.zeros((2, len(live)), jnp.int32)
    missing = layer.hosted.missing(taken[:, 0]).sum(1, dtype=jnp.int32)
    return jnp.stack([jnp.where(live, taken.shape[-1], 0), missing])


def _leaving(cache: KVCache, plan: Plan) -> list[tuple[jax.Array, Any]]:
    """Returns what `flush` of every pooled layer does, at once for all that are alike: they are rows to it."""
    states = {i: plan.policies[i].flush_slice(cache.layers[i], cache.lengths) for i in plan.pooled}
    alike: dict[Any, list[int]] = {}
    for i, state in states.items():
        leaves, tree = jax.tree.flatten(state)
        alike.setdefault((plan.policies[i], tree, *((x.shape, x.dtype) for x in leaves)), []).append(i)
    found = {}
    for (policy, *_), layers in alike.items():
        together = jax.tree.map(lambda *x: jnp.concatenate(x), *(states[i] for i in layers))
        rows, origin = len(cache.lengths.origin), jnp.tile(cache.lengths.origin, len(layers))
        left = policy.flush(together, dataclasses.replace(cache.lengths, origin=origin))
        for at, i in enumerate(layers):
            found[i] = jax.tree.map(lambda x, at=at, rows=rows: x[at * rows : (at + 1) * rows], left)
    return [found[i] for i in plan.pooled]


@functools.lru_cache(maxsize=16)
def _programs(graph: nnx.GraphDef, tree: jax.tree_util.PyTreeDef, plan: Plan):
    # Also what no step reads: its place would be another at every step, and a GPU's graph be told so, kernel by kernel.
    @functools.partial(
        jax.jit, donate_argnums=1, keep_unused=True, compiler_options=compiler_options.OPTIONS.get(plan.platform)
    )
    def step(leaves: list[jax.Array], state: DecodeState, pool: jax.Array | None) -> tuple[DecodeState, Step]:
        # A session goes on with its only row, whose end mark comes into the cache when it has ended: nothing is left out.
        ended = state.done if len(state.done) > 1 else None
        live = jnp.ones_like(state.done) if ended is None else ~ended
        model = nnx.merge(graph, with_live_tokens(jax.tree.unflatten(tree, leaves), live))
        lengths = state.cache.lengths
        where = lengths.seen[:, None], lengths.seen + 1

        def run(layer: DecoderLayer, x: jax.Array, at: LayerPlace):
            guess = None if at.before is None else lambda: layer.enter(at.before, *where).q
            heads = Heads(*layer.enter(x, *where)[:3], jnp.ones_like(state.last_tokens), layer.scoring)
            view = view_of(layer, lengths, plan.pages(at.number, pool, state.cache.table, ended), at.shared, guess)
            outcome = plan.policies[at.number].decode(state.cache.layers[at.number], heads, view)
            x, experts = layer.leave(x, outcome.attended)
            return x, (outcome.state, _experts(layer, experts, live)), outcome.shared or at.shared

        outputs, kept = zip(*run_layers(model, model.model.embed_tokens(state.last_tokens[:, None]), run), strict=True)
        states, experts = zip(*kept, strict=True)
        logits = model.logits(outputs[-1])[:, 0]
        cache = KVCache(states, dataclasses.replace(lengths, clock=lengths.clock + 1), state.cache.table)
        state = choose_next(logits, dataclasses.replace(state, cache=cache), plan)
        pages = jnp.zeros((3, len(state.last_tokens)), jnp.int32)
        reports = [plan.policies[i].report(states[i], cache.lengths) for i in plan.pooled]
        pages = sum((report.pages for report in reports), pages)
        own = _own(reports, len(state.last_tokens))
        return state, Step(pack(state.last_tokens, pages, sum(experts), own), logits)

    @jax.jit
    def flush(cache: KVCache) -> tuple[jax.Array, list, jax.Array]:
        pages, news = zip(*_leaving(cache, plan), strict=True)
        return jnp.stack(pages)[None], list(news), cache.lengths.next_page

    @functools.partial(jax.jit, donate_argnums=0)
    def flushed(cache: KVCache, news: list) -> KVCache:
        states = list(cache.layers)
        for i, layer_news in zip(plan.pooled, news, strict=True):
            states[i] = plan.policies[i].after_flush(states[i], layer_news, cache.lengths)
        pages = cache.lengths.next_page + 1
        pages = jnp.where(pages < plan.pool.pages, pages, plan.prompt_pages)  # over and over, as rows come and go
        return KVCache(tuple(states), dataclasses.replace(cache.lengths, next_page=pages), cache.table)

    @functools.partial(jax.jit, donate_argnums=0)
    def compact(cache: KVCache, pool: jax.Array) -> tuple[KVCache, jax.Array, jax.Array]:
        states, packed, shared = list(cache.layers), [], None
        count = plan.compact_every // plan.page_size
        # A round that was the last of the pages for new tokens has its end there; they begin anew then.
        behind = jnp.where(cache.lengths.next_page == plan.prompt_pages, plan.pool.pages, cache.lengths.next_page)
        first, lengths = behind - count, dataclasses.replace(cache.lengths, next_page=behind)
        for i in plan.pooled:
            newest = plan.pages(i, pool, cache.table).run(first, count)
            outcome = plan.policies[i].compact(states[i], newest, View(lengths, shared=shared))
            states[i], shared = outcome.state, outcome.shared or shared
            packed.append(outcome.pages)
        return KVCache(tuple(states), cache.lengths, cache.table), jnp.stack(packed, axis=1), first

    return step, flush, flushed, compact
