"""The device state of the clustered cache, and moves of tokens, pages and masks that its steps share."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from icejax.ops.digests import Digests

NO_PAGE = np.int32(-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ClusteredState:
    """What the device keeps of a layer.

    Attributes:
        num_sinks: sinks of each row; a prompt may be shorter.
        sinks_k, sinks_v: the first tokens.
        window_k, window_v: the newest tokens, oldest first.
        levels: the digest tree: one digest per page of the pool, and the nodes above.
        page_ids: the pages found in the newest step; NO_PAGE where there are no more, and before the first.
        held: their keys and values, if they stay on the device.
        fetched: how many of them came from the host, over KV heads.
        weights: what their tokens that were attended exactly weighed, summed over query heads; 0 for the others.
    """

    num_sinks: jax.Array  # i32[B]
    sinks_k: jax.Array  # dtype[B, K, sinks, H]
    sinks_v: jax.Array
    window_k: jax.Array  # dtype[B, K, window, H]
    window_v: jax.Array
    levels: tuple[Digests, ...]
    page_ids: jax.Array  # i32[B, K, M]
    weights: jax.Array  # f32[B, K, M, p]
    held: tuple[jax.Array, jax.Array]  # dtype[B, K, M or 0, p, H] each
    fetched: jax.Array  # i32[B]


def rows(x: jax.Array) -> jax.Array:
    """Returns [B, K, ...] as [B K, ...]."""
    return x.reshape(-1, *x.shape[2:])


def per_head(mask: jax.Array, k: jax.Array) -> jax.Array:
    """Returns a mask of rows [B, S] for every KV head of `k` [B, K, H]."""
    return jnp.broadcast_to(mask[:, None, :], (*k.shape[:2], mask.shape[1]))


def take(x: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the tokens of `x` [B, K, T, H] at `positions` [B or 1, S], zero where `mask` is False."""
    positions, mask = jnp.broadcast_arrays(positions, mask)
    index = jnp.clip(positions, 0, x.shape[2] - 1)[:, None, :, None]
    return jnp.where(mask[:, None, :, None], jnp.take_along_axis(x, index, axis=2, mode="promise_in_bounds"), 0)
