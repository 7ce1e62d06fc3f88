"""Attention to the best tokens of pages whose keys come first: ranked by these, then attended to with their values alone."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.ops.attention.dense import EINSUM, Attended, Scoring, masked_scores
from icejax.ops.pages.digests import Digests
from icejax.ops.pages.paged_attention import none_waits
from icejax.ops.pages.tail import attend_tail
from icejax.ops.pages.value_fit import FromKeys
from icejax.ops.topk import best


class RankedTokens(NamedTuple):
    """What the keys of pages tell of a query's attention before any value is known.

    Attributes:
        best: indices of the best slots, which stand one behind another, best first, i32[R, m].
        there: which of them are attended to exactly, bool[R, m].
        own: softmax weights of what stands on the device, f32[R, G, S].
        weights: those of the best, f32[R, G, m]; 0 where none is attended to.
        rest: what all other tokens contribute to the output, f32[R, G, Hv].
        lse: log-sum-exp of all, f32[R, G].
    """

    best: jax.Array
    there: jax.Array
    own: jax.Array
    weights: jax.Array
    tail: jax.Array
    lse: jax.Array

    def attended(self, resident: Float[Array, "R S Hv"], values: Float[Array, "R m Hv"]) -> Attended:
        """Returns what the queries attend to, in fp32, given the values of what is attended to exactly."""
        out = EINSUM("rgs,rsh->rgh", self.own.astype(resident.dtype), resident)
        out += EINSUM("rgs,rsh->rgh", self.weights.astype(values.dtype), values)
        return Attended(out + self.tail, self.lse)


def rank_tokens(
    q: Float[Array, "R G H"],
    resident: tuple[Float[Array, "R S H"], Bool[Array, "R S"]],
    keys: Float[Array, "R P p H"],
    pages: Digests,
    rest: Attended,
    from_keys: FromKeys | None,
    *,
    scoring: Scoring,
    room: Int[Array, " R"],
    most: int,
) -> RankedTokens:
    """Returns the `room` slots of pages with the largest softmax weights, summed over query heads, and what others contribute.

    Others weigh what their keys say; their values are the mean of their page's and what keys tell of values.

    Args:
        resident: keys and mask of what stands on the device, and is attended to exactly; every row sees one of them.
        pages: digests [R, P] of the pages; those of no tokens hide their keys.
        rest: attention f32[R, G, Hv], f32[R, G] to what is in none of these pages.
        from_keys: values from keys; None: others count as the mean of their page.
        most: the largest `room` there is.
    """
    keys, *rest = none_waits(keys, *rest)
    slots = jnp.arange(keys.shape[2])[None, None] < pages.count[..., None]
    flat, keys = slots.reshape(len(q), -1), keys.reshape(len(q), -1, q.shape[-1])
    own = masked_scores(q, resident[0], resident[1][:, None], scoring=scoring)
    paged = masked_scores(q, keys, flat[:, None], scoring=scoring)
    highest = jnp.maximum(jnp.maximum(own.max(-1), paged.max(-1)), rest[1])  # the rest may outweigh all of them
    own, paged = jnp.exp(own - highest[..., None]), jnp.exp(paged - highest[..., None])
    beyond = jnp.exp(rest[1] - highest)
    total = own.sum(-1) + paged.sum(-1) + beyond
    worth = jnp.where(flat, (paged / total[..., None]).sum(1), -1.0)
    found, taken, (there,) = best(worth, min(most, worth.shape[-1]), flat.astype(jnp.int32), room=room)
    there = (there > 0) & (jnp.arange(found.shape[-1])[None] < room[:, None])
    weights = jnp.where(there[:, None], jnp.take_along_axis(paged, found[:, None], axis=2, mode="promise_in_bounds"), 0.0)
    out = attend_tail(jnp.where(taken[:, None], 0.0, paged), keys, slots, pages, from_keys)
    out += beyond[..., None] * rest[0]
    own, weights, out = (x / total[..., None] for x in (own, weights, out))
    return RankedTokens(found, there, own, weights, out, jnp.log(total) + highest)
