"""Prefill and decode: pure array code that knows nothing of text.

Prefill is layer-major: one program runs one layer over the whole prompt, so the device holds the weights, the
prompt's activations and one layer's keys and values. A decode step is one program over all layers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from icejax import compiler, memory
from icejax.cache import host
from icejax.cache.policy import CachePolicy, CacheSpec, Heads, KVCache, Lengths, Outcome, Shared, View
from icejax.models.decoder import CausalLM, DecoderLayer
from icejax.ops.attention import Attended
from icejax.plan import Plan
from icejax.sampling import Sampling, Samplings, choose, folded, row_keys, row_options
from icejax.walk import Place, exact, walk

NOT_FINITE = -1  # in the place of a token: its logits are not all finite, so that there is nothing to choose


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """All that changes from step to step, but for the pool.

    Attributes:
        cache: the device part of the cache.
        last_tokens: the newest token of every row, not yet in the cache.
        done: rows that have ended; they go on with their last token, which is not to be read.
        key: every row's own random key.
        sampling: how each row chooses its tokens; None where all take the most likely one as it is.
        seen: which tokens the text holds; None unless a row has a repetition penalty.
    """

    cache: KVCache
    last_tokens: jax.Array  # i32[B]
    done: jax.Array  # bool[B]
    key: jax.Array  # key[B]
    sampling: Samplings | None = None
    seen: jax.Array | None = None  # bool[B, V]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """What a decode step brought.

    Attributes:
        tokens_and_pages: the chosen tokens or NOT_FINITE, the pages (single slots where the policy finds those) attended to
            exactly, those brought from the host and those needed, over layers and KV heads: one array, for one transfer.
        logits: of the chosen tokens.
    """

    tokens_and_pages: jax.Array  # i32[4, B]
    logits: jax.Array  # f32[B, V]


def prefill(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    *,
    sampling: Sequence[Sampling] = (),
    draws: Sequence[tuple[int, int]] | None = None,
    progress: Callable[[int], None] | None = None,
    host_memory_limit: int | None = None,
) -> tuple[DecodeState, Step, jax.Array | None]:
    """Runs the prompts and chooses the first new token.

    Args:
        prompts: token ids, one list per row.
        sampling: how every row samples; without it all are greedy.
        draws: seed and index of every row's random key, so that a prompt draws alike in whatever batch it stands; None: 0
            and the row's place.
        progress: called with the number of layers done.
        host_memory_limit: bytes of host memory that the pool may take; None: what is free.

    Returns:
        The state to decode from, what the prompt brought (no pages), and the pool.

    Raises:
        InputError: the host has not enough memory for the pool; raised before anything runs.
    """
    pool = None
    if plan.pool_shape is not None:
        pool = host.allocate(plan.pool_shape, plan.pool_dtype, limit=host_memory_limit)
    tokens = np.zeros((len(prompts), plan.spec.prompt_capacity), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    prompt_lengths = jnp.asarray([len(p) for p in prompts], jnp.int32)
    states, written = [], 0

    def run(layer: DecoderLayer, x: jax.Array, at: Place):
        return _prefill_layer(layer, x, prompt_lengths, at.shared, policy=plan.policies[at.number], spec=plan.spec)

    for i, (x, (state, pages)) in enumerate(walk(model, _embed(model, jnp.asarray(tokens)), run)):
        states.append(state)
        if pages is not None:
            pool = host.write_layer(pool, pages, plan.pooled.index(i))
            written = pages.shape[0]
        x.block_until_ready()  # or the pages of many layers would wait for the host on the device
        if progress is not None:
            progress(i + 1)
    logits = _last_logits(model, x, prompt_lengths)
    cache = KVCache(tuple(states), Lengths(prompt_lengths, jnp.int32(0), jnp.int32(written)))
    none, keys = jnp.zeros(len(prompts), jnp.int32), row_keys(draws or [(0, i) for i in range(len(prompts))])
    state = DecodeState(cache, none, none > 0, keys, *row_options(sampling, prompts, model.config.vocab_size))
    # A step's results are bound to the device, as its pool is: so must the first state be, or the step is compiled twice.
    state = jax.device_put(_first_token(logits, state, plan=plan), memory.device())
    return state, _first_step(state, logits), pool


def extend(
    model: CausalLM, tokens: Sequence[int], plan: Plan, state: DecodeState, pool: jax.Array | None, *,
    progress: Callable[[int], None] | None = None,
) -> tuple[DecodeState, Step, jax.Array | None]:  # fmt: skip
    """Puts more tokens behind those of a cache of one row and chooses the next, as `prefill` does; takes state and pool.

    The new tokens attend exactly to all before them, whose pages are read from the pool block by block. The caller sees to
    it that the pool has room: `Plan.room_for`. `progress` is called with the number of layers done.
    """
    padded = np.zeros((1, plan.padded(len(tokens))), np.int32)
    padded[0, : len(tokens)] = tokens
    lengths, new = state.cache.lengths, jnp.asarray([len(tokens)], jnp.int32)
    # What a layer gives is bound to the device, as the pool is: so must the first input be, or a layer is compiled twice.
    first = jax.device_put(_embed(model, jnp.asarray(padded)), memory.device())
    states, used = [], jnp.int32(0)

    def run(layer: DecoderLayer, x: jax.Array, at: Place):
        i, pages = at.number, plan.pages(at.number, pool)  # of the pool with the pages of the layers before
        return _extend_layer(layer, x, lengths, new, state.cache.layers[i], pages, at.shared, policy=plan.policies[i])

    for i, (x, (layer_state, pages, filled)) in enumerate(walk(model, first, run)):
        states.append(layer_state)
        if pages is not None:
            x.block_until_ready()  # it reads the pool that is written now
            pool, used = host.write_layer(pool, pages, plan.pooled.index(i), first=lengths.pages), filled
        if progress is not None:
            x.block_until_ready()
            progress(i + 1)
    logits = _last_logits(model, x, new)
    lengths = Lengths(lengths.seen + new, jnp.int32(0), lengths.pages + used)
    seen = None if state.seen is None else state.seen.at[0, jnp.asarray(tokens)].set(True)
    cache, key = KVCache(tuple(states), lengths), folded(state.key, lengths.prompt[0])
    state = dataclasses.replace(state, cache=cache, done=jnp.zeros_like(state.done), key=key, seen=seen)
    state = jax.device_put(_first_token(logits, state, plan=plan), memory.device())
    return state, _first_step(state, logits), pool


@functools.partial(jax.jit, static_argnames="policy", donate_argnums=(1, 4))
def _extend_layer(
    layer: DecoderLayer, x: jax.Array, lengths: Lengths, new: jax.Array, state, pages, shared, *, policy: CachePolicy
):
    positions = lengths.seen[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
    heads = Heads(*layer.enter(x, positions, lengths.seen + new), new, layer.scoring)
    found = policy.extend(state, heads, _view(layer, lengths, pages, shared))
    return layer.leave(x, found.attended.out), (found.state, found.pages, found.used), found.shared or shared


def _view(layer: DecoderLayer, lengths: Lengths, pages: host.PoolLayer | None, shared: Shared | None, guess=None) -> View:
    return View(lengths, pages, shared, guess, layer.turn, layer.project)


@jax.jit
def _embed(model: CausalLM, tokens: jax.Array) -> jax.Array:
    return model.model.embed_tokens(tokens)


@functools.partial(jax.jit, static_argnames=("policy", "spec"), donate_argnames="x")
def _prefill_layer(layer: DecoderLayer, x: jax.Array, new: jax.Array, shared, *, policy: CachePolicy, spec: CacheSpec):
    def keep(q: jax.Array, k: jax.Array, v: jax.Array, attended: Attended) -> Outcome:
        with jax.named_scope("pack"):
            view = _view(layer, Lengths.none(len(new)), None, shared)
            return policy.prefill(policy.init(spec), Heads(q, k, v, new, layer.scoring), attended, view)

    x, found = exact(layer, x, new, keep)
    return x, (found.state, found.pages), found.shared or shared


def _first_step(state: DecodeState, logits: jax.Array) -> Step:
    """What a prompt brought: a token, and no pages."""
    return Step(jnp.pad(state.last_tokens[None], ((0, 3), (0, 0))), logits)


@jax.jit
def _last_logits(model: CausalLM, x: jax.Array, lengths: jax.Array) -> jax.Array:
    return model.logits(jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1))[:, 0]


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="state")
def _first_token(logits: jax.Array, state: DecodeState, *, plan: Plan) -> DecodeState:
    return _choose(logits, state, plan)


def _choose(logits: jax.Array, state: DecodeState, plan: Plan) -> DecodeState:
    """Puts the next token of every row that has not ended into the state."""
    keys = folded(state.key, state.cache.lengths.decoded)
    tokens = choose(logits, state.sampling, keys=keys, seen=state.seen)
    # As an index it would be that of the last token; the caller is to stop before anything comes of it.
    tokens = jnp.where(jnp.isfinite(logits).all(-1), tokens, NOT_FINITE)
    tokens = jnp.where(state.done, state.last_tokens, tokens)
    ended = jnp.isin(tokens, jnp.asarray(plan.eos_token_ids, jnp.int32)) if plan.eos_token_ids else jnp.zeros_like(state.done)
    seen = state.seen
    if seen is not None:
        seen = seen.at[jnp.arange(len(tokens)), tokens].set(True)
    return dataclasses.replace(state, last_tokens=tokens, done=state.done | ended, seen=seen)


class Decoding:
    """The decode programs of one model and plan. Weights are passed flat: walking a module takes longer than a step.

    Attributes:
        model: the model.
        decoded: steps since the prompt, as the state of the next step has them.
    """

    def __init__(self, model: CausalLM, plan: Plan) -> None:
        graph, state = nnx.split(model)
        self._leaves, tree = jax.tree.flatten(state)
        self._programs = _programs(graph, tree, plan)
        self.model, self._plan = model, plan
        self.decoded = 0

    def step(self, state: DecodeState, pool: jax.Array | None) -> tuple[DecodeState, Step, jax.Array | None]:
        """Puts `last_tokens` into the cache and chooses the next; returns state, what the step brought, and pool.

        Donates `state`, and, when a window page is full and goes to the pool, `pool`.
        """
        step, flush, flushed, compact = self._programs
        state, brought = step(self._leaves, state, pool)
        self.decoded += 1
        if self._plan.page_size and self.decoded % self._plan.page_size == 0:
            pages, news, at = flush(state.cache)
            state, pool = dataclasses.replace(state, cache=flushed(state.cache, news)), host.write_pages(pool, pages, at)
        if self._plan.compact_every and self.decoded % self._plan.compact_every == 0:
            count = self._plan.compact_every // self._plan.page_size
            first = state.cache.lengths.pages - count
            pages = host.read_pages(pool, first, count=count, dtype=self._plan.spec.dtype)
            cache, pages, at = compact(state.cache, pages)
            state, pool = dataclasses.replace(state, cache=cache), host.write_pages(pool, pages, at)
        return state, brought, pool


@functools.lru_cache(maxsize=16)
def _programs(graph: nnx.GraphDef, tree: jax.tree_util.PyTreeDef, plan: Plan):
    @functools.partial(jax.jit, donate_argnums=1, compiler_options=compiler.OPTIONS.get(plan.platform))
    def step(leaves: list[jax.Array], state: DecodeState, pool: jax.Array | None) -> tuple[DecodeState, Step]:
        model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        lengths = state.cache.lengths
        where = lengths.seen[:, None], lengths.seen + 1

        def run(layer: DecoderLayer, x: jax.Array, at: Place):
            guess = None if at.before is None else lambda: layer.enter(at.before, *where)[0]
            heads = Heads(*layer.enter(x, *where), jnp.ones_like(state.last_tokens), layer.scoring)
            view = _view(layer, lengths, plan.pages(at.number, pool, state.done), at.shared, guess)
            found = plan.policies[at.number].decode(state.cache.layers[at.number], heads, view)
            return layer.leave(x, found.attended.out), found.state, found.shared or at.shared

        outputs, states = zip(*walk(model, model.model.embed_tokens(state.last_tokens[:, None]), run), strict=True)
        logits = model.logits(outputs[-1])[:, 0]
        cache = KVCache(states, dataclasses.replace(lengths, decoded=lengths.decoded + 1))
        state = _choose(logits, dataclasses.replace(state, cache=cache), plan)
        pages = jnp.zeros((3, len(state.last_tokens)), jnp.int32)
        pages = sum((plan.policies[i].report(states[i], cache.lengths).found for i in plan.pooled), pages)
        return state, Step(jnp.concatenate([state.last_tokens[None], pages]), logits)

    @jax.jit
    def flush(cache: KVCache) -> tuple[jax.Array, list, jax.Array]:
        found = [plan.policies[i].flush(cache.layers[i], cache.lengths) for i in plan.pooled]
        return jnp.stack([page for page, _ in found])[None], [news for _, news in found], cache.lengths.pages

    @functools.partial(jax.jit, donate_argnums=0)
    def flushed(cache: KVCache, news: list) -> KVCache:
        states = list(cache.layers)
        for i, layer_news in zip(plan.pooled, news, strict=True):
            states[i] = plan.policies[i].flushed(states[i], layer_news, cache.lengths)
        return KVCache(tuple(states), dataclasses.replace(cache.lengths, pages=cache.lengths.pages + 1))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def compact(cache: KVCache, pages: jax.Array) -> tuple[KVCache, jax.Array, jax.Array]:
        states, packed, shared = list(cache.layers), [], None
        for layer, i in enumerate(plan.pooled):
            found = plan.policies[i].compact(states[i], pages[:, layer], View(cache.lengths, shared=shared))
            states[i], shared = found.state, found.shared or shared
            packed.append(found.pages)
        return KVCache(tuple(states), cache.lengths), jnp.stack(packed, axis=1), cache.lengths.pages - pages.shape[0]

    return step, flush, flushed, compact
