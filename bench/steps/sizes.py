"""Bytes of arrays and of the pages that a step fetches: for the benches. Two four-bit numbers take one byte."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from icejax.cache.bases.retrieval import Retrieval
from icejax.cache.policies.clustered import Clustered
from icejax.cache.pool.page_format import bits_dtype, pool_shapes
from icejax.engine.plan import Plan

FOUR_BITS = ("int4", "uint4", "float4_e2m1fn")


def nbytes(arrays: Any) -> int:
    """Returns the bytes of all arrays in a tree, without random keys; int4[3, 2] takes 3 bytes."""
    leaves = (x for x in jax.tree.leaves(arrays) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key))
    return sum(math.prod(x.shape) * (4 if str(x.dtype) in FOUR_BITS else 8 * x.dtype.itemsize) // 8 for x in leaves)


def fetched_bytes(plan: Plan) -> int:
    """Returns the bytes of one page, or of one slot where the policy fetches single slots; 0 without a host pool."""
    if plan.pool is None:
        return 0
    planes, rows, width = plan.pool_shape(0)[-3:]
    return planes * (rows if plan.pool.unit == plan.page_size else 1) * width * bits_dtype(plan.pool_dtype).itemsize


def fetched_per_step(policy: Retrieval, pages: int, plan: Plan | None = None) -> int:
    """Returns how many of `pages` pages, or of their slots, a KV head fetches in a step.

    Where keys are fetched first the unit is a slot, and a key or a value alone counts half. For example, the keys of 112 pages
    of 16 and 239 values count as (1792 + 239) // 2 = 1015 slots. Codes count as slots of as many bytes, which `plan` tells.
    """
    if isinstance(policy, Clustered) and policy.look:
        pool = pool_shapes(*plan.pool_sizes(1))
        codes = policy.reads.num_selected(pages, pool) * pool.codes.shape[-1]
        return policy.num_fetched(pages) - (-codes // fetched_bytes(plan))
    if isinstance(policy, Clustered) and policy.keys_first:
        return (policy.num_ranked(pages) * policy.page_size + policy.num_fetched(pages)) // 2
    return policy.num_fetched(pages)
