"""The k-th largest number of a row, or another threshold, by bisection over the 32 bits of fp32 numbers, without a sort.

Top-k of long rows, top-p selection and sampling call it, on rows [B, V].
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

BITS = 2  # bits of a threshold that one pass over the numbers decides


def ordered(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Returns u32 keys that sort as the numbers do in fp32; both zeros have one key.

    Example: -1, 0 and 1 become 0x407fffff, 0x80000000 and 0xbf800000.
    """
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0, x).astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def threshold(holds: Callable[[UInt32[Array, "B N"]], Bool[Array, "B N"]], rows: int) -> UInt32[Array, " B"]:
    """Returns for each row the largest u32 for which `holds` is true; 0 where it is true for none.

    Assumes that `holds` is true up to some number and false beyond. Each pass decides `BITS` bits, the highest first. The
    passes are unrolled: XLA:GPU would end the CUDA graph of a step at a loop.

    Args:
        holds: numbers u32[B, N] -> whether the property holds for each, bool[B, N].
        rows: B.
    """
    bits = jnp.zeros(rows, jnp.uint32)
    for shift in range(32 - BITS, -1, -BITS):
        higher = jnp.arange(1, 2**BITS, dtype=jnp.uint32) << shift
        bits += holds(bits[:, None] + higher[None]).sum(-1, dtype=jnp.uint32) << shift
    return bits


def least_of(order: UInt32[Array, "B V"], count: Int[Array, " B"]) -> UInt32[Array, " B"]:
    """Returns the `count`-th largest number of each row, u32[B]; for a count of 0 the largest u32."""
    return threshold(lambda bound: (order[:, None] >= bound[:, :, None]).sum(-1, dtype=jnp.int32) >= count[:, None], len(count))
