"""Prefill: runs prompts [B, T] of token ids into a new cache and chooses each row's first token.

`serving.start` and `Session` call it. Prefill is layer-major: one program runs one layer over the whole prompt [B, T, D], so
the device holds the weights, the prompt's activations and one layer's keys and values. Experts in host memory come to the
device for one layer at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from icejax.cache.pool import allocation, host_pool
from icejax.cache.pool.extents import table_for
from icejax.cache.pool.host_pool import Pool
from icejax.cache.pool.page_format import NoPages, PagesWithCodes, without_codes
from icejax.cache.protocol import CachePolicy, Heads, KVCache, Lengths, Outcome, Shared
from icejax.cache.shares import ORDER, PAGES, state_cuts
from icejax.cache.sizes import CacheSpec
from icejax.engine.buckets import bucket
from icejax.engine.decode.layer import view_of
from icejax.engine.decode.state import DecodeState, Step
from icejax.engine.first_token import choose_first
from icejax.engine.layers import LayerPlace, embed, run_exact_with_experts, run_layers
from icejax.engine.penalties import row_options
from icejax.engine.plan import Plan
from icejax.engine.sampling import Sampling, row_keys
from icejax.models.decoder import CausalLM, DecoderLayer
from icejax.models.sharding import module_cuts
from icejax.ops.attention.dense import Attended
from icejax.ops.experts.offloaded_experts import with_experts_on_device
from icejax.runtime.mesh import WHOLE, Mesh, on_mesh, stream_cut

Pages = Float[Array, "P B K planes p W"] | PagesWithCodes | NoPages
Kept = tuple[Any, Pages | None]  # a layer's state, and its pages for the pool
Table = Int[Array, "B X"]  # the extents of each row


def prefill(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    *,
    sampling: Sequence[Sampling] = (),
    draws: Sequence[tuple[int, int]] | None = None,
    progress: Callable[[int], None] | None = None,
    host_memory_limit: int | None = None,
    into: tuple[Pool, np.ndarray] | None = None,
) -> tuple[DecodeState, Step, Pool | None]:
    """Runs the prompts and chooses the first new token of each.

    Where experts are in host memory, the experts that the prompts use most move to the device, in each layer.

    Args:
        prompts: token ids, one list per row.
        sampling: sampling options of each row; empty: all rows are greedy.
        draws: seed and index of each row's random key, so that a prompt's draws do not depend on its batch; None: seed 0 and
            the row's number.
        progress: called with the number of layers done.
        host_memory_limit: bytes of host memory that the pool may take; None: all free memory.
        into: an existing pool, which is donated, and the prompts' extents in it, i32[B, X]; None: a new pool.

    Returns:
        The state to decode from, the first step (its counters hold the tokens alone), and the pool.

    Raises:
        InputError: the host has too little memory for the pool; raised before anything runs.
    """
    lengths = [len(prompt) for prompt in prompts]
    pool, table = pool_for(lengths, plan, host_memory_limit) if into is None else (into[0], jnp.asarray(into[1]))
    layers = prefill_layers(model, prompts, plan)
    x, states, pool = keep_layers(layers, plan, pool, table, progress=progress)
    sampling, draws = tuple(sampling), draws or [(0, i) for i in range(len(prompts))]
    state, step = first_state(model, prompts, plan, x, states, table, sampling=sampling, draws=draws)
    return state, step, pool


def pool_for(lengths: Sequence[int], plan: Plan, limit: int | None) -> tuple[Pool | None, Table | None]:
    """Returns an empty pool for prompts of so many tokens and answers, and each row's extents; None and None without a pool."""
    if not plan.pooled:
        return None, None
    count, table = table_for(np.stack([plan.extents(length) for length in lengths]))
    return allocation.allocate(*plan.pool_sizes(count), limit=limit, mesh=plan.mesh), jnp.asarray(table)


def prefill_layers(
    model: CausalLM, prompts: Sequence[Sequence[int]], plan: Plan
) -> Iterable[tuple[Float[Array, "B T D"], Kept]]:
    """Yields each layer's output over the prompts, and its policy's state and pages after them."""
    lengths = lengths_of(prompts)

    def run(layer: DecoderLayer, x: jax.Array, place: LayerPlace):
        sizes, loaded = dict(policy=plan.policies[place.number], spec=plan.spec_of(place.number)), with_experts_on_device(layer)
        *results, uses = _prefill_layer(loaded, x, lengths, place.shared, **sizes)
        if layer.offloaded is not None:
            layer.experts.update_resident(loaded.experts, uses)
        return results

    return run_layers(model, embed(model, jnp.asarray(padded_prompts(prompts, plan.spec))), run)


def keep_layers(
    layers: Iterable[tuple[Float[Array, "B T D"], Kept]],
    plan: Plan,
    pool: Pool | None,
    table: Table | None,
    *,
    progress: Callable[[int], None] | None = None,
) -> tuple[Float[Array, "B T D"], tuple[Any, ...], Pool | None]:
    """Writes the layers' pages to the pool; returns the last layer's output, all states, and the pool. Donates the pool."""
    states = []
    for i, (x, (state, pages)) in enumerate(layers):
        states.append(state)
        if pages is not None:
            pool = write_layer(pool, pages, table, plan.pooled.index(i), mesh=plan.mesh)
        x.block_until_ready()  # otherwise pages of many layers pile up on the device while the host writes
        if progress is not None:
            progress(i + 1)
    return x, tuple(states), pool


def write_layer(pool: Pool, pages: Pages, table: Table, layer: int, *, mesh: Mesh | None) -> Pool:
    """Returns the pool with a prompt's pages of one layer; `layer` is its place in the pool. Donates the pool."""
    together = math.gcd(len(without_codes(pages)), host_pool.EXTENT)
    new_pages = jax.tree.map(lambda x: x[:, None], pages)
    return host_pool.write_pages(pool, new_pages, table, 0, layer, together=together, mesh=mesh)


def first_state(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    x: Float[Array, "B T D"],
    states: tuple[Any, ...],
    table: Table | None,
    *,
    sampling: Sequence[Sampling],
    draws: Sequence[tuple[int, int]],
) -> tuple[DecodeState, Step]:
    """Returns the state to decode from, and the first step.

    Args:
        x: the last layer's output over the prompts.
        states: the layers' states after the prompts.
    """
    cache = KVCache(states, Lengths.of(lengths_of(prompts), plan.prompt_pages), table)
    zeros, options = np.zeros(len(prompts), np.int32), row_options(sampling, prompts, model.config.vocab_size)
    # NumPy's arrays and `lengths_of` are copied to the device; each eager operation of JAX would be a program to compile.
    state = DecodeState(cache, zeros, zeros > 0, row_keys(draws), lengths_of(prompts), *options)
    return choose_first(model, x, lengths_of(prompts), state, plan)


def lengths_of(prompts: Sequence[Sequence[int]]) -> Int[Array, " B"]:
    """Returns the number of tokens of every prompt."""
    return jnp.asarray(np.asarray([len(prompt) for prompt in prompts], np.int32))


def padded_prompts(prompts: Sequence[Sequence[int]], spec: CacheSpec) -> np.ndarray:
    """Returns the prompts as i32[B, T], padded with zeros on the right."""
    tokens = np.zeros((len(prompts), min(spec.prompt_capacity, bucket(max(map(len, prompts))))), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens


def prefill_outcome(
    layer: DecoderLayer, heads: Heads, attended: Attended, shared: Shared | None, *, policy: CachePolicy, spec: CacheSpec
) -> Outcome:
    """Returns the outcome of the policy's `prefill` for prompts that have attended exactly."""
    with jax.named_scope("pack"):
        view = view_of(layer, Lengths.none(len(heads.lengths)), heads.lengths, None, shared)
        return policy.prefill(policy.init(spec), heads, attended, view)


@functools.partial(jax.jit, static_argnames=("policy", "spec"), donate_argnames="x")
def _prefill_layer(layer: DecoderLayer, x: jax.Array, new: jax.Array, shared, *, policy: CachePolicy, spec: CacheSpec):
    def run(layer: DecoderLayer, x: jax.Array, new: jax.Array, shared: Shared | None):
        def keep(q: jax.Array, k: jax.Array, v: jax.Array, attended: Attended) -> Outcome:
            return prefill_outcome(layer, Heads(q, k, v, new, layer.scoring), attended, shared, policy=policy, spec=spec)

        x, outcome, experts = run_exact_with_experts(layer, x, new, keep)
        uses = None if experts is None else expert_uses(experts, new, layer.config.experts.count)
        return x, (outcome.state, outcome.pages), outcome.shared or shared, uses

    stream = stream_cut(layer.mesh)
    results = stream, (state_cuts(policy, spec, layer.mesh), PAGES), ORDER, WHOLE
    return on_mesh(layer.mesh, run, (layer, x, new, shared), (module_cuts(layer), stream, WHOLE, ORDER), results)


def expert_uses(experts: Int[Array, "B T k"], lengths: Int[Array, " B"], count: int) -> Int[Array, " {count}"]:
    """Returns how many real tokens are routed to each expert; padding does not count."""
    is_token = jnp.arange(experts.shape[1])[None, :] < lengths[:, None]
    return jnp.zeros(count, jnp.int32).at[experts].add(is_token[..., None].astype(jnp.int32))
