"""Prompts, and more text behind them: pure array code that knows nothing of text.

Prefill is layer-major: one program runs one layer over the whole prompt, so the device holds the weights, the
prompt's activations and one layer's keys and values; where experts are in host memory, one layer's experts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from icejax.cache.pool import host_pool
from icejax.cache.pool.extents import table_for
from icejax.cache.protocol import CachePolicy, Heads, KVCache, Lengths, Outcome, Shared
from icejax.cache.sizes import CacheSpec
from icejax.engine.counters import pack_token
from icejax.engine.decode_step import DecodeState, Step, chosen, view_of
from icejax.engine.layers import Place, exact_with_experts, walk
from icejax.engine.plan import Plan, ladder
from icejax.engine.sampling import Sampling, folded, row_keys, row_options
from icejax.models.decoder import CausalLM, DecoderLayer
from icejax.ops.attention.dense import Attended
from icejax.ops.experts.offloaded_experts import on_device
from icejax.runtime import devices


def prefill(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    *,
    sampling: Sequence[Sampling] = (),
    draws: Sequence[tuple[int, int]] | None = None,
    progress: Callable[[int], None] | None = None,
    host_memory_limit: int | None = None,
    into: tuple[jax.Array, np.ndarray] | None = None,
    layers: Iterable[tuple[jax.Array, tuple[Any, jax.Array | None]]] | None = None,
) -> tuple[DecodeState, Step, jax.Array | None]:
    """Runs the prompts and chooses the first new token.

    Of experts in host memory those that the prompts take most often are on the device from now on, in each layer.

    Args:
        prompts: token ids, one list per row.
        sampling: how every row samples; without it all are greedy.
        draws: seed and index of every row's random key, so that a prompt draws alike in whatever batch it stands; None: 0
            and the row's place.
        progress: called with the number of layers done.
        host_memory_limit: bytes of host memory that the pool may take; None: what is free.
        into: a pool that there is already, which is taken, and the extents in it that are the prompts', i32[B, X].
        layers: of prompts that have attended already every layer's output [B, T, D], with the state and the pages it leaves;
            none is asked for before there is a pool. None: the prompts run.

    Returns:
        The state to decode from, what the prompt brought (no pages), and the pool.

    Raises:
        InputError: the host has not enough memory for the pool; raised before anything runs.
    """
    pool = table = None
    if plan.pooled:
        if into is None:
            count, table = table_for(np.stack([plan.extents(len(prompt)) for prompt in prompts]))
            pool = host_pool.allocate(plan.pool_shape(count), plan.pool_dtype, limit=host_memory_limit)
        else:
            pool, table = into
        table = jnp.asarray(table)
    prompt_lengths = jnp.asarray([len(p) for p in prompts], jnp.int32)
    states = []

    def run(layer: DecoderLayer, x: jax.Array, at: Place):
        sizes, whole = dict(policy=plan.policies[at.number], spec=plan.spec_of(at.number)), on_device(layer)
        *out, taken = _prefill_layer(whole, x, prompt_lengths, at.shared, **sizes)
        if layer.hosted is not None:
            layer.experts.settle(whole.experts, taken)
        return out

    if layers is None:
        # As in `extend`, and because experts from the host are bound to the device too.
        layers = walk(model, jax.device_put(_embed(model, jnp.asarray(_padded(prompts, plan.spec))), devices.device()), run)
    for i, (x, (state, pages)) in enumerate(layers):
        states.append(state)
        if pages is not None:
            together = math.gcd(len(pages), host_pool.EXTENT)
            pool = host_pool.write_pages(pool, pages[:, None], table, 0, plan.pooled.index(i), together=together)
        x.block_until_ready()  # or the pages of many layers would wait for the host on the device
        if progress is not None:
            progress(i + 1)
    logits = _last_logits(model, x, prompt_lengths)
    cache = KVCache(tuple(states), Lengths.of(prompt_lengths, plan.prompt_pages), table)
    none, keys = jnp.zeros(len(prompts), jnp.int32), row_keys(draws or [(0, i) for i in range(len(prompts))])
    own = row_options(sampling, prompts, model.config.vocab_size)
    state = DecodeState(cache, none, none > 0, keys, jnp.copy(prompt_lengths), *own)
    # A step's results are bound to the device, as its pool is: so must the first state be, or the step is compiled twice.
    state = jax.device_put(_first_token(logits, state, plan=plan), devices.device())
    return state, _first_step(state, logits), pool


def _padded(prompts: Sequence[Sequence[int]], spec: CacheSpec) -> np.ndarray:
    """Returns prompts as the programs take them, i32[B, T], filled up with zeros on the right."""
    tokens = np.zeros((len(prompts), min(spec.prompt_capacity, ladder(max(map(len, prompts))))), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens


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
    first = jax.device_put(_embed(model, jnp.asarray(padded)), devices.device())
    states, used = [], jnp.int32(0)

    def run(layer: DecoderLayer, x: jax.Array, at: Place):
        i, pages = at.number, plan.pages(at.number, pool, table)  # of the pool with the pages of the layers before
        layer = on_device(layer)
        return _extend_layer(layer, x, lengths, new, state.cache.layers[i], pages, at.shared, policy=plan.policies[i])

    for i, (x, (layer_state, pages, filled)) in enumerate(walk(model, first, run)):
        states.append(layer_state)
        if pages is not None:
            x.block_until_ready()  # it reads the pool that is written now
            pool, used = host_pool.write_pages(pool, pages[:, None], table, lengths.pages, plan.pooled.index(i)), filled
        if progress is not None:
            x.block_until_ready()
            progress(i + 1)
    logits = _last_logits(model, x, new)
    lengths = Lengths.of(lengths.seen + new, lengths.pages + used)
    seen = None if state.seen is None else state.seen.at[0, jnp.asarray(tokens)].set(True)
    cache, key = KVCache(tuple(states), lengths, table), folded(state.key, lengths.seen)
    began = jnp.copy(lengths.seen)
    state = dataclasses.replace(state, cache=cache, done=began < 0, key=key, began=began, seen=seen)
    state = jax.device_put(_first_token(logits, state, plan=plan), devices.device())
    return state, _first_step(state, logits), pool


@functools.partial(jax.jit, static_argnames="policy", donate_argnums=(1, 4))
def _extend_layer(
    layer: DecoderLayer, x: jax.Array, lengths: Lengths, new: jax.Array, state, pages, shared, *, policy: CachePolicy
):
    positions = lengths.seen[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
    heads = Heads(*layer.enter(x, positions, lengths.seen + new)[:3], new, layer.scoring)
    outcome = policy.extend(state, heads, view_of(layer, lengths, pages, shared))
    return layer.leave(x, outcome.attended)[0], (outcome.state, outcome.pages, outcome.used), outcome.shared or shared


@jax.jit
def _embed(model: CausalLM, tokens: jax.Array) -> jax.Array:
    return model.model.embed_tokens(tokens)


def kept(
    layer: DecoderLayer, heads: Heads, attended: Attended, shared: Shared | None, *, policy: CachePolicy, spec: CacheSpec
) -> Outcome:
    """Returns what a layer keeps of prompts that have attended exactly."""
    with jax.named_scope("pack"):
        return policy.prefill(policy.init(spec), heads, attended, view_of(layer, Lengths.none(len(heads.new)), None, shared))


@functools.partial(jax.jit, static_argnames=("policy", "spec"), donate_argnames="x")
def _prefill_layer(layer: DecoderLayer, x: jax.Array, new: jax.Array, shared, *, policy: CachePolicy, spec: CacheSpec):
    def keep(q: jax.Array, k: jax.Array, v: jax.Array, attended: Attended) -> Outcome:
        return kept(layer, Heads(q, k, v, new, layer.scoring), attended, shared, policy=policy, spec=spec)

    x, outcome, experts = exact_with_experts(layer, x, new, keep)
    taken = None if experts is None else _counted(experts, new, layer.config.experts.count)
    return x, (outcome.state, outcome.pages), outcome.shared or shared, taken


def _counted(experts: Int[Array, "B T k"], lengths: Int[Array, " B"], count: int) -> Int[Array, " {count}"]:
    """Returns how often tokens that are no padding take each expert."""
    there = jnp.arange(experts.shape[1])[None, :] < lengths[:, None]
    return jnp.zeros(count, jnp.int32).at[experts].add(there[..., None].astype(jnp.int32))


def _first_step(state: DecodeState, logits: jax.Array) -> Step:
    """What a prompt brought: a token, and no pages."""
    return Step(pack_token(state.last_tokens), logits)


@jax.jit
def _last_logits(model: CausalLM, x: jax.Array, lengths: jax.Array) -> jax.Array:
    return model.logits(jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1))[:, 0]


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="state")
def _first_token(logits: jax.Array, state: DecodeState, *, plan: Plan) -> DecodeState:
    return chosen(logits, state, plan)
