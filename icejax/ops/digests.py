"""Digests: what the device keeps of a page, and the score a query gives a page by its digest alone."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from icejax.ops.attention import EINSUM

TAIL_CLAMP = 3.0  # nats; a wide page's second-order term overstates its weight without bound


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Digests:
    """Digests of pages, or of nodes: runs of neighbouring pages.

    Attributes:
        count: tokens, 0 for an empty one.
        mean: mean key.
        variance: variance of every channel of the keys.
        value: mean value.
    """

    count: jax.Array  # i32[B, K, P]
    mean: jax.Array  # dtype[B, K, P, H]
    variance: jax.Array  # dtype[B, K, P, H]
    value: jax.Array  # dtype[B, K, P, H]


def digest(k: Float[Array, "B K P p H"], v: Float[Array, "B K P p H"], mask: Bool[Array, "B K P p"]) -> Digests:
    """Returns the digests of pages, in the dtype of `k`; slots outside `mask` are not read."""
    count = mask.sum(-1, dtype=jnp.int32)
    keys, values = (jnp.where(mask[..., None], x, 0).astype(jnp.float32) for x in (k, v))
    divisor = jnp.maximum(count, 1)[..., None].astype(jnp.float32)
    mean = keys.sum(-2) / divisor
    spread = jnp.where(mask[..., None], keys - mean[..., None, :], 0)
    variance = jnp.square(spread).sum(-2) / divisor
    return _stored(Digests(count, mean, variance, values.sum(-2) / divisor), k.dtype)


def merge(parts: Digests) -> Digests:
    """Returns the digests of runs of pages from those of their pages, an axis more: [B, K, P, fan-out] to [B, K, P].

    Exact but for rounding to the stored dtype: variances add by the parallel-axis rule.
    """
    weight = parts.count.astype(jnp.float32)[..., None]
    divisor = jnp.maximum(weight.sum(-2), 1.0)
    mean, variance, value = (x.astype(jnp.float32) for x in (parts.mean, parts.variance, parts.value))
    centre = (weight * mean).sum(-2) / divisor
    spread = variance + jnp.square(mean - centre[..., None, :])
    merged = Digests(
        parts.count.sum(-1, dtype=jnp.int32), centre, (weight * spread).sum(-2) / divisor, (weight * value).sum(-2) / divisor
    )
    return _stored(merged, parts.mean.dtype)


def score(q: Float[Array, "B K G H"], digests: Digests) -> tuple[Float[Array, "B K G P"], Float[Array, "B K G P"]]:
    """Returns the estimated log-sum-exp of every page for every query head, to second order, in fp32; -inf if empty.

    With s = 1/sqrt(H): log(count) + s q.mean + s^2/2 sum_j q_j^2 variance_j. Twice: to choose pages by, as it is, because
    one key that stands out makes its page wide; and to weigh pages by, the last term at most 3 nats.
    """
    scaled = q.astype(jnp.float32) * q.shape[-1] ** -0.5
    first = EINSUM("bkgh,bkph->bkgp", scaled, digests.mean.astype(jnp.float32)) + jnp.log(digests.count)[:, :, None, :]
    second = 0.5 * EINSUM("bkgh,bkph->bkgp", jnp.square(scaled), digests.variance.astype(jnp.float32))
    return first + second, first + jnp.minimum(second, TAIL_CLAMP)


def _stored(digests: Digests, dtype: jnp.dtype) -> Digests:
    """Rounds to `dtype`; variances that fp16 could not hold are kept finite."""
    largest = float(jnp.finfo(dtype).max)
    vectors = (jnp.clip(x, -largest, largest).astype(dtype) for x in (digests.mean, digests.variance, digests.value))
    return Digests(digests.count, *vectors)
