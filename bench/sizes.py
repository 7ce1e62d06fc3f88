"""Bytes of arrays, of which numbers of four bits stand two in one."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

FOUR_BITS = ("int4", "uint4", "float4_e2m1fn")


def nbytes(arrays: Any) -> int:
    """Returns the bytes of all arrays in a tree; random keys count as nothing."""
    kept = (x for x in jax.tree.leaves(arrays) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key))
    return sum(math.prod(x.shape) * (4 if str(x.dtype) in FOUR_BITS else 8 * x.dtype.itemsize) // 8 for x in kept)
