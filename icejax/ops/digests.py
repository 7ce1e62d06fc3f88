"""Digests: what the device keeps of a page, and the score a query gives a page by its digest alone."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from icejax.ops.attention import EINSUM

VARIANCE_CLAMP = 3.0  # nats; a wide page's second-order term overstates it without bound


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Digests:
    """Digests of pages.

    Attributes:
        count: tokens in the page, 0 for an empty one.
        mean: mean key, in the model's dtype.
        variance: variance of every channel of the keys, in the model's dtype.
    """

    count: jax.Array  # i32[B, K, P]
    mean: jax.Array  # dtype[B, K, P, H]
    variance: jax.Array  # dtype[B, K, P, H]


def digest(k: Float[Array, "B K P p H"], mask: Bool[Array, "B K P p"]) -> Digests:
    """Returns the digests of pages of keys; slots outside `mask` are not read."""
    count = mask.sum(-1, dtype=jnp.int32)
    keys = jnp.where(mask[..., None], k, 0).astype(jnp.float32)
    divisor = jnp.maximum(count, 1)[..., None].astype(jnp.float32)
    mean = keys.sum(-2) / divisor
    spread = jnp.where(mask[..., None], keys - mean[..., None, :], 0)
    variance = jnp.square(spread).sum(-2) / divisor
    return Digests(count, mean.astype(k.dtype), variance.astype(k.dtype))


def score(q: Float[Array, "B K G H"], digests: Digests) -> Float[Array, "B K G P"]:
    """Returns the estimated log-sum-exp of every page for every query head, to second order, in fp32; -inf if empty.

    With s = 1/sqrt(H): log(count) + s q.mean + s^2/2 sum_j q_j^2 variance_j, the last term at most 3 nats.
    """
    scaled = q.astype(jnp.float32) * q.shape[-1] ** -0.5
    first = EINSUM("bkgh,bkph->bkgp", scaled, digests.mean.astype(jnp.float32))
    second = 0.5 * EINSUM("bkgh,bkph->bkgp", jnp.square(scaled), digests.variance.astype(jnp.float32))
    return jnp.log(digests.count)[:, :, None, :] + first + jnp.minimum(second, VARIANCE_CLAMP)
