"""Caches of long contexts without a long prefill, for `bench.decode`: a short prefill's keys and values, tiled with noise."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.bases.all_tokens import TokenState
from icejax.cache.bases.similar_pages import SimilarPages
from icejax.cache.index.base import put_pages
from icejax.cache.index.digest_tree import Digested
from icejax.cache.pool import allocation, host_pool
from icejax.cache.pool.extents import table_for
from icejax.cache.pool.page_format import without_codes
from icejax.cache.protocol import Lengths
from icejax.engine.decode.state import DecodeState
from icejax.engine.plan import Plan, make_plan
from icejax.engine.prefill import prefill
from icejax.models.decoder import CausalLM
from icejax.ops.pages import tree
from icejax.ops.pages.code_attention import CodedPages
from icejax.ops.pages.digests import Digests, digest, put
from icejax.runtime import devices

BASE = 4096  # approximate tokens of the short prefill
NOISE = 0.1  # of the standard deviation of all keys, or values, of a layer


def fill(model: CausalLM, plan: Plan, policy, *, context: int, seed: int = 0) -> tuple[DecodeState, jax.Array | None]:
    """Returns decode state and pool of a cache of about `context` tokens, with synthetic keys and values.

    Only whole pages are filled, so the context is up to a page shorter. The codes of `coded` stay 0, because ranking takes the
    same time for all codes. For example, with 32 sinks, 16 filled window slots and pages of 16, a context of 5,000 tokens
    becomes 48 + 309 x 16 = 4,992, and the short prefill has 48 + 253 x 16 = 4,096 tokens.
    """
    base = BASE
    if plan.pooled:  # whole pages, besides the sinks and the window slots that a prompt fills
        unpaged = policy.window_layout.sinks + policy.window_layout.fill
        base = (BASE - unpaged) // policy.page_size * policy.page_size + unpaged
        context = (context - unpaged) // policy.page_size * policy.page_size + unpaged
    rows = plan.spec.batch_size
    prompts = np.random.default_rng(seed).integers(0, model.config.vocab_size, (rows, base)).tolist()
    with_pages = policy if not plan.pooled or plan.pool.planes else dataclasses.replace(policy, exact=None)  # to be read below
    short = make_plan(model, with_pages, batch_size=rows, prompt_tokens=base, new_tokens=16)
    state, _, pool = prefill(model, prompts, short)
    layers = list(state.cache.layers)
    for i, layer_policy in enumerate(plan.policies):
        if isinstance(layers[i], TokenState) and layers[i].k.shape[1] >= base:  # not a sliding window's ring
            slots = jax.eval_shape(lambda layer_policy=layer_policy: layer_policy.init(plan.spec)).k.shape[1]
            sizes = dict(base=base, context=context, slots=slots)
            layers[i] = TokenState(*(_tiled(x, **sizes) for x in (layers[i].k, layers[i].v)))
    pages, long_pool, table = 0, None, None
    if plan.pooled:
        per_copy, pages = (base - unpaged) // policy.page_size, (context - unpaged) // policy.page_size
        first_pages = _read(without_codes(pool), state.cache.table, count=per_copy, plan=short)
        count, table = table_for(np.stack([plan.extents(context)] * rows))
        long_pool, table = allocation.allocate(*plan.pool_sizes(count)), jnp.asarray(table)
        noise = jax.random.normal(jax.random.key(seed), first_pages.shape, first_pages.dtype)
        # An empty state holds the same buffer several times, which cannot be donated.
        for i in plan.pooled:
            layers[i] = jax.tree.map(jnp.copy, plan.policies[i].init(plan.spec))
        leaves = {i: _by_page(layers[i].index) for i in plan.pooled}
        for first in range(0, pages, per_copy):
            count = min(per_copy, pages - first)
            copy = _noisy(first_pages, noise, jnp.int32(first), scale=NOISE if first else 0.0)[:count]
            stored = _with_codes(copy, policy=plan.policies[plan.pooled[0]])
            long_pool = host_pool.write_pages(long_pool, stored, table, jnp.int32(first))
            for nth, i in enumerate(plan.pooled):
                leaves[i] = _put(leaves[i], copy[:, nth], jnp.int32(first), policy=policy)
        for i in plan.pooled:
            prefilled, index = state.cache.layers[i], leaves[i]
            if not isinstance(index, CodedPages):
                fit = layers[i].index.fit and (prefilled.index.fit or layers[i].index.fit)
                index = dataclasses.replace(layers[i].index, levels=_build(index), scatter=prefilled.index.scatter, fit=fit)
            layers[i] = dataclasses.replace(layers[i], window=prefilled.window, index=index, factors=prefilled.factors)
    lengths = Lengths.of(jnp.full(rows, context, jnp.int32), pages)
    cache = dataclasses.replace(state.cache, layers=tuple(layers), lengths=lengths, table=table)
    # Wait here, or the first step's time would include the filling.
    return jax.block_until_ready(jax.device_put(dataclasses.replace(state, cache=cache), devices.device())), long_pool


@functools.partial(jax.jit, static_argnames=("base", "context", "slots"))
def _tiled(x: jax.Array, *, base: int, context: int, slots: int) -> jax.Array:
    """Returns the first `base` tokens of `x` [R, S, H] repeated with noise up to `context`, and padded to `slots`."""
    tokens = x[:, :base]
    # The noise repeats at another length than the tokens, so every copy has its own noise.
    shape = (tokens.shape[0], base - base // 7, tokens.shape[2])
    noise = jax.random.normal(jax.random.key(0), shape, x.dtype) * (NOISE * tokens.astype(jnp.float32).std()).astype(x.dtype)
    repeated, repeated_noise = (jnp.tile(part, (1, -(-context // part.shape[1]), 1))[:, :context] for part in (tokens, noise))
    repeated += jnp.where(jnp.arange(context)[None, :, None] < base, jnp.zeros((), x.dtype), repeated_noise)
    return jnp.pad(repeated, ((0, 0), (0, slots - context), (0, 0)))


@functools.partial(jax.jit, static_argnames=("count", "plan"))
def _read(pool: jax.Array, table: jax.Array, *, count: int, plan: Plan) -> jax.Array:
    """Returns the first pages of all layers dtype[P', L, B, K, 2, p, H]."""
    return jnp.stack([plan.pages(i, pool, table).run(jnp.int32(0), count) for i in plan.pooled], axis=1)


@jax.jit
def _noisy(pages: jax.Array, noise: jax.Array, shift: jax.Array, scale: float) -> jax.Array:
    """Returns pages with noise that differs for every `shift`."""
    return (pages + scale * pages.std() * jnp.roll(noise, shift * 7 + shift // 11, axis=(0,))).astype(pages.dtype)


@functools.partial(jax.jit, static_argnames="policy")
def _with_codes(pages: jax.Array, *, policy: SimilarPages) -> Any:
    """Returns whole pages dtype[P', L, B, K, planes, p, H] as the pool keeps them."""

    def of_layer(pages: jax.Array) -> Any:
        planes = tuple(jnp.unstack(pages.transpose(1, 2, 0, 3, 4, 5), axis=3))
        return jax.tree.map(lambda x: x.transpose(2, 0, 1, 3, 4, 5), policy.stored(planes, jnp.ones(planes[0].shape[:4], bool)))

    return jax.tree.map(lambda *x: jnp.stack(x, axis=1), *map(of_layer, jnp.unstack(pages, axis=1)))


_build = jax.jit(tree.build, donate_argnums=0)  # a million tokens leave no room for a second copy


def _by_page(index: Digested | CodedPages) -> Digests | CodedPages:
    """Returns what an index holds of each page."""
    return index if isinstance(index, CodedPages) else index.levels[0]


@functools.partial(jax.jit, static_argnames="policy", donate_argnums=0)
def _put(leaves: Digests | CodedPages, pages: jax.Array, first: jax.Array, *, policy: SimilarPages):
    """Writes digests, or codes, of whole pages dtype[P', B, K, 2, p, H] at page `first` of `leaves`; donates `leaves`."""
    k, v = (pages[:, :, :, i].transpose(1, 2, 0, 3, 4) for i in (0, 1))
    mask = jnp.ones(k.shape[:4], bool)
    if isinstance(leaves, CodedPages):
        return put_pages(leaves, policy.index.describe(k, v, mask), first)
    return put(leaves, digest(k, v, mask, policy.digest_dtype), first)
