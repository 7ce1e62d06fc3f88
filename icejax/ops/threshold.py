"""The largest number down to which something holds of a row's numbers: by bisection, where a sort would take longer."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

BITS = 2  # of the 32 of a threshold that are found in one pass over the numbers


def ordered(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Returns whole numbers u32 in the order of fp32 numbers; the two zeros are one."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0, x).astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def threshold(holds: Callable[[UInt32[Array, "B N"]], Bool[Array, "B N"]], rows: int) -> UInt32[Array, " B"]:
    """Returns the largest numbers u32[B] that `holds` is true of, which is true up to some number; 0 where of none.

    By bisection, `BITS` at a time. The passes are written out: at a loop XLA:GPU would end the CUDA graph of a step.
    """
    found = jnp.zeros(rows, jnp.uint32)
    for shift in range(32 - BITS, -1, -BITS):
        more = jnp.arange(1, 2**BITS, dtype=jnp.uint32) << shift
        found += holds(found[:, None] + more[None]).sum(-1, dtype=jnp.uint32) << shift
    return found


def least_of(order: UInt32[Array, "B V"], count: Int[Array, " B"]) -> UInt32[Array, " B"]:
    """Returns the largest number u32[B] that `count` numbers of a row are not below; for 0 the largest there is."""
    return threshold(lambda least: (order[:, None] >= least[:, :, None]).sum(-1, dtype=jnp.int32) >= count[:, None], len(count))
