"""Move: the tokens of one row go from a cache that has them all on the device to another cache, without a prefill.

`Session` calls it when a conversation outgrows the device. Each layer's keys and values are given to the new policy as a prompt
is, so the new cache is the one that a prefill of the same tokens would leave. One layer moves at a time, and its old state is
freed.

Example: a session of SmolLM2 begins with room for 2,048 tokens, and its third text would end at token 2,300. The 1,900 tokens
so far are packed into pages; the text then extends the clustered cache.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from icejax.cache.pool.host_pool import Pool
from icejax.cache.protocol import CachePolicy, KVCache, Lengths, Outcome, Shared, View
from icejax.cache.shares import ORDER, PAGES, state_cuts, whole_spec
from icejax.cache.sizes import CacheSpec
from icejax.engine.buckets import bucket
from icejax.engine.layout import Layout
from icejax.engine.plan import Plan
from icejax.engine.prefill import write_layer
from icejax.models.decoder import CausalLM
from icejax.ops.attention.dense import Attended, Scoring
from icejax.runtime.mesh import WHOLE, Mesh, on_mesh

Kind = tuple[CachePolicy, CacheSpec]  # of a layer's cache


def move(
    model: CausalLM, states: list[Any], tokens: int, before: Layout, after: Plan, into: tuple[Pool | None, jax.Array | None]
) -> tuple[KVCache, Pool | None]:
    """Returns the cache and the pool of one row in the layout `after`.

    Args:
        states: the layers' states in the layout `before`, of `Full` and `Ring` alone; emptied layer by layer.
        tokens: how many of the row's first tokens move; later ones are forgotten.
        after: a plan whose longest prompt has at least so many tokens. Its policies may read of queries their squares alone.
        into: an empty pool, which is donated, and the row's extents in it, from `prefill.pool_for`.
    """
    (pool, table), moved, shared, lengths = into, [], None, jnp.asarray([tokens], jnp.int32)
    for i, layer in enumerate(model.model.layers):
        state, states[i] = states[i], None
        policy, spec = after.policies[i], after.spec_of(i)
        if before.policies[i] == policy and _fits(policy, whole_spec(spec, after.mesh), state):
            moved.append(state)  # a sliding window stays
            continue
        kinds = dict(old=(before.policies[i], before.spec_of(i)), new=(policy, spec))
        sizes = dict(scoring=layer.scoring, padded=min(spec.prompt_capacity, bucket(tokens)), mesh=after.mesh)
        outcome = _move_layer(state, lengths, shared, **kinds, **sizes)
        if outcome.pages is not None:
            pool = write_layer(pool, outcome.pages, table, after.pooled.index(i), mesh=after.mesh)
        moved.append(outcome.state)
        shared = outcome.shared or shared
        jax.block_until_ready(outcome.state)  # otherwise pages of many layers pile up on the device
    return KVCache(tuple(moved), Lengths.of(lengths, after.prompt_pages), table), pool


def _fits(policy: CachePolicy, spec: CacheSpec, state: Any) -> bool:
    """Says whether a state has the shapes that the policy's states have for `spec`."""
    expected = jax.eval_shape(lambda: policy.init(spec))
    return [x.shape for x in jax.tree.leaves(state)] == [x.shape for x in jax.tree.leaves(expected)]


@functools.partial(jax.jit, static_argnames=("old", "new", "scoring", "padded", "mesh"))
def _move_layer(
    state: Any, lengths: jax.Array, shared: Shared | None, *,
    old: Kind, new: Kind, scoring: Scoring, padded: int, mesh: Mesh | None,
) -> Outcome:  # fmt: skip
    policy, spec = new

    def run(state: Any, lengths: jax.Array, shared: Shared | None) -> Outcome:
        heads = state.heads(old[1], lengths, scoring, padded=padded)
        nothing = Attended(jnp.zeros((*heads.q.shape[:3], heads.v.shape[3]), heads.v.dtype), jnp.zeros(heads.q.shape[:3]))
        return policy.prefill(policy.init(spec), heads, nothing, View(Lengths.none(len(lengths)), shared=shared))

    cuts, results = (state_cuts(*old, mesh), WHOLE, ORDER), Outcome(state_cuts(*new, mesh), pages=PAGES, shared=ORDER)
    return on_mesh(mesh, run, (state, lengths, shared), cuts, results)
