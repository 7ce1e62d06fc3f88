"""Attention over pages: to all of their tokens, or to the best ones exactly and to the rest by their means."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from icejax.ops.attention.dense import EINSUM, Attended, Scoring, masked_scores, merge_by_lse
from icejax.ops.pages.tail import even_weights
from icejax.ops.pages.value_fit import FromKeys
from icejax.ops.topk import largest


def attend_whole(
    q: Float[Array, "R G H"],
    resident: tuple[Float[Array, "R S H"], Float[Array, "R S Hv"], Bool[Array, "R S"]],
    pages: tuple[Float[Array, "R M p H"], Float[Array, "R M p Hv"], Bool[Array, "R M p"]],
    bias: Float[Array, "R g M"] | None = None,
    *,
    scoring: Scoring,
) -> tuple[Attended, Float[Array, "R M p"]]:
    """Returns the attention to all resident tokens and to pages, in fp32, and what the page tokens weigh, summed over heads.

    Args:
        resident: keys, values and mask of what stays on the device; every row sees one of them.
        pages: keys, values and mask of the pages fetched; values outside the mask must be finite.
        bias: added to the scores that each head, or all, give a page's keys; -inf hides the page.
    """
    rows = len(q)
    keys, values, mask = resident
    own = masked_scores(q, keys, mask[:, None], scoring=scoring)
    keys, values_paged = (x.reshape(rows, -1, x.shape[-1]) for x in pages[:2])
    paged = masked_scores(q, keys, pages[2].reshape(rows, 1, -1), scoring=scoring)
    if bias is not None:
        paged += jnp.repeat(bias, pages[2].shape[2], axis=-1)
    highest = jnp.maximum(own.max(-1), paged.max(-1))
    own, paged = (jnp.exp(x - highest[..., None]) for x in (own, paged))
    total = own.sum(-1) + paged.sum(-1)
    out = EINSUM("rgs,rsh->rgh", own.astype(values.dtype), values)
    out += EINSUM("rgs,rsh->rgh", paged.astype(values.dtype), values_paged)
    weights = (paged / total[..., None]).sum(1).reshape(pages[2].shape)
    return Attended(out / total[..., None], jnp.log(total) + highest), weights


def attend_paged(
    q: Float[Array, "R G H"],
    resident: tuple[Float[Array, "R S H"], Float[Array, "R S Hv"], Bool[Array, "R S"]],
    pages: tuple[Float[Array, "R M p H"], Float[Array, "R M p Hv"], Bool[Array, "R M p"]],
    rest: tuple[Float[Array, "R G Hv"], Float[Array, "R G"]],
    from_keys: FromKeys | None = None,
    *,
    scoring: Scoring,
    room: Int[Array, " R"],
    most: int,
    tail: bool,
) -> tuple[Attended, Float[Array, "R M p"], Float[Array, "R G"]]:
    """Returns the attention in fp32, what the page tokens attended exactly weigh, summed over heads, and how uneven others are.

    That is 0 of tokens that are not attended exactly; of these the summed squares of how far their weights are from the mean
    of their page's.

    Exact are all resident tokens and the `room` page tokens of largest attention weight, summed over the query heads. Every
    other token of a page counts with its exact weight and the mean value of its page's others, and what its keys tell of its
    values (`from_keys`); `rest` is the output and the log-sum-exp of what is not here. Without `tail` both are left out.

    Args:
        resident: keys, values and mask of what stays on the device; every row sees one of them.
        pages: keys, values and mask of the pages fetched; values outside the mask must be finite.
        most: the largest `room` there is.
    """
    rows, group, size = q.shape
    keys, values, mask = resident
    own = masked_scores(q, keys, mask[:, None], scoring=scoring)
    keys, values_paged, slots = pages
    keys, *rest = none_waits(keys, *rest)
    flat = slots.reshape(rows, -1)
    # One axis of tokens: with two XLA:CPU would transpose the keys first.
    keys = keys.reshape(rows, -1, size)
    paged = masked_scores(q, keys, flat[:, None], scoring=scoring)
    highest = jnp.maximum(own.max(-1), paged.max(-1))
    own, paged = jnp.exp(own - highest[..., None]), jnp.exp(paged - highest[..., None])
    total = own.sum(-1) + paged.sum(-1) + (jnp.exp(rest[1] - highest) if tail else 0.0)
    worth = jnp.where(flat, (paged / total[..., None]).sum(1), -1.0)
    chosen = largest(worth, room, most=most) & flat
    exact = jnp.where(chosen[:, None], paged, 0.0)
    if tail:
        # A page's other tokens share their weight alike, which is their weight with their mean value.
        others = slots & ~chosen.reshape(slots.shape)
        by_page = (paged - exact).reshape(rows, group, *slots.shape[1:]).sum(-1)
        alike = even_weights(by_page, others, others.sum(-1, dtype=jnp.float32))
        apart = paged - exact - alike
        exact += alike
    uneven = jnp.square(apart / total[..., None]).sum(-1) if tail else jnp.zeros_like(total)
    weight = jnp.maximum(own.sum(-1) + exact.sum(-1), 1e-30)
    out = EINSUM("rgs,rsh->rgh", own.astype(values.dtype), values)
    out += EINSUM("rgs,rsh->rgh", exact.astype(values.dtype), values_paged.reshape(rows, -1, values_paged.shape[-1]))
    if tail and from_keys is not None:
        out += from_keys(EINSUM("rgs,rsh->rgh", apart.astype(keys.dtype), keys))[..., : out.shape[-1]]
    out /= weight[..., None]
    weights = jnp.where(chosen, jnp.maximum(worth, jnp.finfo(jnp.float32).tiny), 0).reshape(slots.shape)
    exactly = Attended(out, jnp.log(weight) + highest)
    return Attended(*merge_by_lse(*exactly, *rest)) if tail else exactly, weights, uneven


def none_waits(*parts: jax.Array) -> tuple[jax.Array, ...]:
    """Returns what it is given; XLA:GPU would compute the rest in one kernel with the keys' scores, when the keys have come."""
    return lax.platform_dependent(*parts, cpu=lambda *x: x, default=lambda *x: lax.optimization_barrier(x))
