"""Rings of slots that hold the newest tokens: which position is in which slot, and how new tokens replace old ones.

`policies/full.py` keeps sliding-window layers in rings, `policies/kivi.py` the tokens that have no codes yet. Slots are
[B K, S, H].
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from icejax.ops.slots import by_head, merge_heads


def ring_positions(seen: Int[Array, " B"], slots: int) -> Int[Array, "B S"]:
    """Returns the position of the token in each slot of a ring after `seen` i32[B] tokens, i32[B, slots]; below 0: empty.

    A token at position t is in slot t % slots. With 4 slots:

        seen = 2    [0, 1, -2, -1]    slots 2 and 3 are empty
        seen = 6    [4, 5, 2, 3]      tokens 4 and 5 have replaced 0 and 1
    """
    newest = seen[:, None] - 1
    return newest - (newest - jnp.arange(slots)[None, :]) % slots


def with_new_tokens(old: Float[Array, "R S H"], new: Float[Array, "B T K H"], at: Int[Array, "B S"]) -> Float[Array, "R S H"]:
    """Returns the ring with new tokens: slot s of row b takes new token `at[b, s]`; where this is below 0 it keeps its own.

    With at = [-1, 0, 1, -2] slots 1 and 2 take new tokens 0 and 1, slots 0 and 3 keep theirs.
    """
    index, is_new = jnp.maximum(at, 0)[:, :, None, None], (at >= 0)[:, :, None, None]
    new = jnp.where(is_new, jnp.take_along_axis(new, index, axis=1), 0)
    return jnp.where(
        merge_heads(by_head(jnp.broadcast_to(is_new, new.shape))), merge_heads(by_head(new)).astype(old.dtype), old
    )
