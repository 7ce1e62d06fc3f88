"""Attention over fetched pages: exact for all their tokens, or for the best tokens with an estimate for the rest.

Retrieval policies call it in a decode step. R is B K, in one axis: queries [R, G, H], resident tokens [R, S, H] (sinks and
window), pages [R, M, p, H].
"""

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
    """Returns the attention to resident tokens and pages, in fp32, and page tokens' softmax weights, summed over query heads.

    Args:
        resident: keys, values and mask of the tokens on the device; each row has at least one.
        pages: keys, values and mask of the pages fetched; values outside the mask must be finite.
        bias: added to the scores of a page's keys, per query head or for all (g = 1); -inf hides the page.
    """
    rows = len(q)
    keys, values, mask = resident
    near_scores = masked_scores(q, keys, mask[:, None], scoring=scoring)
    keys, values_paged = (x.reshape(rows, -1, x.shape[-1]) for x in pages[:2])
    paged_scores = masked_scores(q, keys, pages[2].reshape(rows, 1, -1), scoring=scoring)
    if bias is not None:
        paged_scores += jnp.repeat(bias, pages[2].shape[2], axis=-1)
    highest = jnp.maximum(near_scores.max(-1), paged_scores.max(-1))
    near_weights, paged_weights = (jnp.exp(x - highest[..., None]) for x in (near_scores, paged_scores))
    total = near_weights.sum(-1) + paged_weights.sum(-1)
    out = EINSUM("rgs,rsh->rgh", near_weights.astype(values.dtype), values)
    out += EINSUM("rgs,rsh->rgh", paged_weights.astype(values.dtype), values_paged)
    weights = (paged_weights / total[..., None]).sum(1).reshape(pages[2].shape)
    return Attended(out / total[..., None], jnp.log(total) + highest), weights


def attend_beside(
    q: Float[Array, "R G H"],
    k: Float[Array, "R S H"],
    v: Float[Array, "R S Hv"],
    mask: Bool[Array, "R S"],
    rest: Attended,
    *,
    scoring: Scoring,
) -> tuple[Attended, Float[Array, "R S"]]:
    """Returns the attention to the keys in `mask` and to the rest, in fp32, and the keys' weights, summed over query heads.

    Args:
        mask: which slots have a token; values outside it must be finite.
        rest: attention to all other tokens, f32[R, G, Hv] and f32[R, G]; each row has at least one.
    """
    scores = masked_scores(q, k, mask[:, None], scoring=scoring)
    highest = jnp.maximum(scores.max(-1, initial=-jnp.inf), rest.lse)
    weights, share = jnp.exp(scores - highest[..., None]), jnp.exp(rest.lse - highest)
    total = weights.sum(-1) + share
    out = EINSUM("rgs,rsh->rgh", weights.astype(v.dtype), v) + share[..., None] * rest.out
    return Attended(out / total[..., None], jnp.log(total) + highest), (weights / total[..., None]).sum(1)


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
    """Returns the attention to resident tokens, pages and the rest, in fp32, with the weights and unevenness of page tokens.

    All resident tokens and the `room` page tokens of largest softmax weight, summed over query heads, are attended exactly.
    The page tokens that are not among them are the tail. They count with their exact weights; a value is estimated by the mean
    value of its page's tail tokens and from its key (`from_keys`). Without `tail` they and `rest` are left out.

    A page whose tokens weigh 0.4, 0.1 and 0.3, with `room` 1 and a resident token of weight 0.2: the first token is exact; the
    values of the other two count 0.2 each, their keys -0.1 and 0.1. The weights returned are 0.4, 0, 0, the unevenness is 0.02.

    Args:
        resident: keys, values and mask of the tokens on the device; each row has at least one.
        pages: keys, values and mask of the pages fetched; values outside the mask must be finite.
        rest: attention output and log-sum-exp of the tokens outside both.
        from_keys: estimator of values from keys; None: a token counts as the mean.
        most: an upper bound of `room`.

    Returns:
        The attention; the softmax weights of the page tokens attended exactly, summed over query heads, 0 for the others; and
        the unevenness, the sum over tail tokens of (weight - mean weight of their page's tail tokens)^2, 0 without `tail`.
    """
    rows, group, size = q.shape
    keys, values, mask = resident
    near_scores = masked_scores(q, keys, mask[:, None], scoring=scoring)
    keys, values_paged, slots = pages
    keys, *rest = separate_kernels(keys, *rest)
    flat = slots.reshape(rows, -1)
    # Tokens in one axis: with two axes XLA:CPU would transpose the keys first.
    keys = keys.reshape(rows, -1, size)
    paged_scores = masked_scores(q, keys, flat[:, None], scoring=scoring)
    highest = jnp.maximum(near_scores.max(-1), paged_scores.max(-1))
    near_weights, paged_weights = jnp.exp(near_scores - highest[..., None]), jnp.exp(paged_scores - highest[..., None])
    total = near_weights.sum(-1) + paged_weights.sum(-1) + (jnp.exp(rest[1] - highest) if tail else 0.0)
    worth = jnp.where(flat, (paged_weights / total[..., None]).sum(1), -1.0)
    chosen = largest(worth, room, most=most) & flat
    value_weights = jnp.where(chosen[:, None], paged_weights, 0.0)
    if tail:
        # To divide a page's tail weight evenly among its tail tokens is to multiply it with their mean value.
        tail_slots = slots & ~chosen.reshape(slots.shape)
        by_page = (paged_weights - value_weights).reshape(rows, group, *slots.shape[1:]).sum(-1)
        even = even_weights(by_page, tail_slots, tail_slots.sum(-1, dtype=jnp.float32))
        deviation = paged_weights - value_weights - even
        value_weights += even
    uneven = jnp.square(deviation / total[..., None]).sum(-1) if tail else jnp.zeros_like(total)
    weight = jnp.maximum(near_weights.sum(-1) + value_weights.sum(-1), 1e-30)
    out = EINSUM("rgs,rsh->rgh", near_weights.astype(values.dtype), values)
    out += EINSUM("rgs,rsh->rgh", value_weights.astype(values.dtype), values_paged.reshape(rows, -1, values_paged.shape[-1]))
    if tail and from_keys is not None:
        out += from_keys(EINSUM("rgs,rsh->rgh", deviation.astype(keys.dtype), keys))[..., : out.shape[-1]]
    out /= weight[..., None]
    weights = jnp.where(chosen, jnp.maximum(worth, jnp.finfo(jnp.float32).tiny), 0).reshape(slots.shape)
    attended = Attended(out, jnp.log(weight) + highest)
    return Attended(*merge_by_lse(*attended, *rest)) if tail else attended, weights, uneven


def separate_kernels(*parts: jax.Array) -> tuple[jax.Array, ...]:
    """Returns its arguments, behind a barrier except on CPU.

    Without it XLA:GPU would compute the rest in the kernel of the keys' scores, which waits for the keys.
    """
    return lax.platform_dependent(*parts, cpu=lambda *x: x, default=lambda *x: lax.optimization_barrier(x))
