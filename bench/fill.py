"""Caches of long contexts without their prefill: keys and values of a short real one, tiled with noise."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.bases.all_tokens import TokenState
from icejax.cache.pool import host_pool
from icejax.cache.pool.extents import table_for
from icejax.cache.protocol import Lengths
from icejax.engine.decode_step import DecodeState
from icejax.engine.plan import Plan, make_plan
from icejax.engine.prefill import prefill
from icejax.models.decoder import CausalLM
from icejax.ops.pages import tree
from icejax.ops.pages.digests import digest, put
from icejax.runtime import devices

BASE = 4096  # tokens of the short prefill, about
NOISE = 0.1  # of the standard deviation of all keys, or values, of a layer


def fill(model: CausalLM, plan: Plan, policy, *, context: int, seed: int = 0) -> tuple[DecodeState, jax.Array | None]:
    """Returns state and pool of a cache of about `context` tokens, as prefill would leave it but for what the keys are.

    A page is filled whole, so that the context is shorter by up to a page. Codes of keys are left 0: ranking by them takes as
    long whatever they say.
    """
    base = BASE
    if plan.pooled:  # whole pages behind sinks and the window that a prompt fills
        beside = policy.window_of.sinks + policy.window_of.fill
        base = (BASE - beside) // policy.page_size * policy.page_size + beside
        context = (context - beside) // policy.page_size * policy.page_size + beside
    rows = plan.spec.batch_size
    prompts = np.random.default_rng(seed).integers(0, model.config.vocab_size, (rows, base)).tolist()
    short = make_plan(model, policy, batch_size=rows, prompt_tokens=base, new_tokens=16)
    state, _, pool = prefill(model, prompts, short)
    layers = list(state.cache.layers)
    for i, kept in enumerate(plan.policies):
        if isinstance(layers[i], TokenState) and layers[i].k.shape[1] >= base:  # a ring stays as it is
            slots = jax.eval_shape(lambda kept=kept: kept.init(plan.spec)).k.shape[1]
            sizes = dict(base=base, context=context, slots=slots)
            layers[i] = TokenState(*(_tiled(x, **sizes) for x in (layers[i].k, layers[i].v)))
    pages, big, table = 0, None, None
    if plan.pooled:
        per_copy, pages = (base - beside) // policy.page_size, (context - beside) // policy.page_size
        real = _read(pool, state.cache.table, count=per_copy, plan=short)
        count, table = table_for(np.stack([plan.extents(context)] * rows))
        big, table = host_pool.allocate(plan.pool_shape(count), plan.pool_dtype), jnp.asarray(table)
        noise = jax.random.normal(jax.random.key(seed), real.shape, real.dtype)
        # An empty state holds one buffer many times over, which could not be given away.
        for i in plan.pooled:
            layers[i] = jax.tree.map(jnp.copy, plan.policies[i].init(plan.spec))
        leaves = {i: layers[i].index.levels[0] for i in plan.pooled}
        for first in range(0, pages, per_copy):
            count = min(per_copy, pages - first)
            copy = _noisy(real, noise, jnp.int32(first), scale=NOISE if first else 0.0)[:count]
            big = host_pool.write_pages(big, copy, table, jnp.int32(first))
            for at, i in enumerate(plan.pooled):
                leaves[i] = _put(leaves[i], copy[:, at], jnp.int32(first), dtype=policy.digest_dtype)
        for i in plan.pooled:
            own = state.cache.layers[i]
            fit = layers[i].index.fit and (own.index.fit or layers[i].index.fit)
            index = dataclasses.replace(layers[i].index, levels=_build(leaves[i]), scatter=own.index.scatter, fit=fit)
            layers[i] = dataclasses.replace(layers[i], window=own.window, index=index, factors=own.factors)
    lengths = Lengths.of(jnp.full(rows, context, jnp.int32), pages)
    cache = dataclasses.replace(state.cache, layers=tuple(layers), lengths=lengths, table=table)
    # Ready, or the first step would be timed with the filling.
    return jax.block_until_ready(jax.device_put(dataclasses.replace(state, cache=cache), devices.device())), big


@functools.partial(jax.jit, static_argnames=("base", "context", "slots"))
def _tiled(x: jax.Array, *, base: int, context: int, slots: int) -> jax.Array:
    """Returns the first `base` tokens of `x` [R, S, H] over and over up to `context`, in `slots`; copies with noise."""
    real = x[:, :base]
    # Repeated at another length than the tokens, so that every copy has its own noise.
    shape = (real.shape[0], base - base // 7, real.shape[2])
    noise = jax.random.normal(jax.random.key(0), shape, x.dtype) * (NOISE * real.astype(jnp.float32).std()).astype(x.dtype)
    whole, moved = (jnp.tile(part, (1, -(-context // part.shape[1]), 1))[:, :context] for part in (real, noise))
    whole += jnp.where(jnp.arange(context)[None, :, None] < base, jnp.zeros((), x.dtype), moved)
    return jnp.pad(whole, ((0, 0), (0, slots - context), (0, 0)))


@functools.partial(jax.jit, static_argnames=("count", "plan"))
def _read(pool: jax.Array, table: jax.Array, *, count: int, plan: Plan) -> jax.Array:
    """Returns the first pages of all layers dtype[P', L, B, K, 2, p, H]."""
    return jnp.stack([plan.pages(i, pool, table).run(jnp.int32(0), count) for i in plan.pooled], axis=1)


@jax.jit
def _noisy(pages: jax.Array, noise: jax.Array, shift: jax.Array, scale: float) -> jax.Array:
    """Returns pages with noise that is another for every `shift`."""
    return (pages + scale * pages.std() * jnp.roll(noise, shift * 7 + shift // 11, axis=(0,))).astype(pages.dtype)


_build = jax.jit(tree.build, donate_argnums=0)  # a million tokens leave no room for a second copy


@functools.partial(jax.jit, static_argnames="dtype", donate_argnums=0)
def _put(leaves, pages: jax.Array, first: jax.Array, *, dtype: str | None):
    """Puts the digests of whole pages dtype[P', B, K, 2, p, H] behind others."""
    k, v = (pages[:, :, :, i].transpose(1, 2, 0, 3, 4) for i in (0, 1))
    return put(leaves, digest(k, v, jnp.ones(k.shape[:4], bool), dtype), first)
