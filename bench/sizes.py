"""Bytes of arrays, of which numbers of four bits stand two in one, and of what a step fetches."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from icejax.cache.bases.retrieval import Retrieval
from icejax.cache.policies.clustered import Clustered
from icejax.cache.pool.page_format import bits_dtype
from icejax.engine.plan import Plan

FOUR_BITS = ("int4", "uint4", "float4_e2m1fn")


def nbytes(arrays: Any) -> int:
    """Returns the bytes of all arrays in a tree; random keys count as nothing."""
    kept = (x for x in jax.tree.leaves(arrays) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key))
    return sum(math.prod(x.shape) * (4 if str(x.dtype) in FOUR_BITS else 8 * x.dtype.itemsize) // 8 for x in kept)


def fetched_bytes(plan: Plan) -> int:
    """Returns the bytes that come from the host with a page, or with a single slot where the policy fetches those."""
    if plan.pool is None:
        return 0
    planes, rows, width = plan.pool_shape(0)[-3:]
    return planes * (rows if plan.pool.unit == plan.page_size else 1) * width * bits_dtype(plan.pool_dtype).itemsize


def fetched_per_step(policy: Retrieval, pages: int) -> int:
    """Returns how many of `pages` pages, or of their slots, come from the host in a step per KV head.

    Where keys come first, slots of keys and of values count as halves.
    """
    if isinstance(policy, Clustered) and policy.keys_first:
        return (policy.num_ranked(pages) * policy.page_size + policy.num_fetched(pages)) // 2
    return policy.num_fetched(pages)
