"""Attention over pages: of the tokens brought to light, the best are attended exactly and the rest by their means."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.ops.attention import EINSUM, merge_by_lse
from icejax.ops.topk import top_k


def attend_paged(
    q: Float[Array, "R G H"],
    resident: tuple[Float[Array, "R S H"], Float[Array, "R S H"], Bool[Array, "R S"]],
    pages: tuple[Float[Array, "R M p H"], Float[Array, "R M p H"], Bool[Array, "R M p"]],
    rest: tuple[Float[Array, "R G H"], Float[Array, "R G"]],
    *,
    room: Int[Array, " R"],
    most: int,
    tail: bool,
) -> tuple[Float[Array, "R G H"], Float[Array, "R M p"]]:
    """Returns the attention in fp32, and what the page tokens attended exactly weigh, summed over heads; 0 for the others.

    Exact are all resident tokens and the `room` page tokens of largest attention weight, summed over the query heads. Every
    other token of a page counts with its exact weight and the mean value of its page's others; `rest` is the output and the
    log-sum-exp of what is not here. Without `tail` both are left out.

    Args:
        resident: keys, values and mask of what stays on the device; every row sees one of them.
        pages: keys, values and mask of the pages fetched; values outside the mask may be anything.
        most: the largest `room` there is.
    """
    rows, group, size = q.shape
    scale = size**-0.5
    keys, values, mask = resident
    own = jnp.where(mask[:, None], EINSUM("rgh,rsh->rgs", q, keys) * scale, -jnp.inf)
    keys, values_paged, slots = pages
    flat = slots.reshape(rows, 1, -1)
    found = jnp.where(flat, EINSUM("rgh,rmph->rgmp", q, keys).reshape(rows, group, -1) * scale, -jnp.inf)
    highest = jnp.maximum(own.max(-1), found.max(-1))
    own, found = jnp.exp(own - highest[..., None]), jnp.exp(found - highest[..., None])
    total = own.sum(-1) + found.sum(-1) + (jnp.exp(rest[1] - highest) if tail else 0.0)
    worth = jnp.where(flat[:, 0], (found / total[..., None]).sum(1), -1.0)
    best = top_k(worth, min(most, worth.shape[-1]))[1]
    fits = jnp.arange(best.shape[-1])[None, :] < room[:, None]
    chosen = jnp.zeros(worth.shape, bool).at[jnp.arange(rows)[:, None], best].set(fits) & flat[:, 0]
    values_paged = jnp.where(slots[..., None], values_paged, 0)
    exact = jnp.where(chosen[:, None], found, 0.0)
    weight = own.sum(-1) + exact.sum(-1)
    out = EINSUM("rgs,rsh->rgh", own.astype(values.dtype), values)
    out += EINSUM("rgs,rsh->rgh", exact.astype(values.dtype), values_paged.reshape(rows, -1, size))
    weights = jnp.where(chosen, jnp.maximum(worth, jnp.finfo(jnp.float32).tiny), 0).reshape(slots.shape)
    if not tail:
        return out / jnp.maximum(weight, 1e-30)[..., None], weights
    others = slots & (weights == 0)
    share = (found - exact).reshape(rows, group, *slots.shape[1:]).sum(-1)
    means = (
        EINSUM("rmp,rmph->rmh", others.astype(values.dtype), values_paged)
        / jnp.maximum(others.sum(-1, dtype=jnp.float32), 1.0)[..., None]
    )
    weight += share.sum(-1)
    out = (out + EINSUM("rgm,rmh->rgh", share, means)) / weight[..., None]
    return merge_by_lse(out, jnp.log(weight) + highest, *rest)[0], weights
