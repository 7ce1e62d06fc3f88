"""Keys-first attention: ranks the tokens of pages by their fetched keys, then attends with the values of the best tokens alone.

Policies with `keys_first` call `rank_tokens`, fetch the values of its best slots, and call `attended`. R is B K, in one axis.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.ops.attention.dense import EINSUM, Attended, Scoring, masked_scores
from icejax.ops.pages.digests import Digests
from icejax.ops.pages.paged_attention import separate_kernels
from icejax.ops.pages.tail import attend_tail
from icejax.ops.pages.value_fit import FromKeys
from icejax.ops.topk import best


class RankedTokens(NamedTuple):
    """The attention as known from the pages' keys, before their values are fetched.

    Attributes:
        best: indices of the best slots among all P p slots, best first, i32[R, m].
        there: which of these slots are attended exactly, bool[R, m].
        own: softmax weights of the resident tokens, f32[R, G, S].
        weights: softmax weights of the best slots, f32[R, G, m]; 0 where `there` is False.
        tail: contribution of all other tokens to the output, f32[R, G, Hv].
        lse: log-sum-exp of all tokens, f32[R, G].
    """

    best: jax.Array
    there: jax.Array
    own: jax.Array
    weights: jax.Array
    tail: jax.Array
    lse: jax.Array

    def attended(self, resident: Float[Array, "R S Hv"], values: Float[Array, "R m Hv"]) -> Attended:
        """Returns the attention in fp32, from the values of the resident tokens and of the best slots."""
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
    """Returns the `room` slots of largest softmax weight, summed over query heads, and the contribution of all other tokens.

    The other tokens of these pages count with exact weights; a value is estimated by its page's mean and its key (`tail`).

    Args:
        resident: keys and mask of the tokens on the device, which are attended exactly; each row has at least one.
        keys: keys of the pages.
        pages: digests [R, P] of the pages; a count of 0 hides the page's keys.
        rest: attention f32[R, G, Hv], f32[R, G] to the tokens outside these pages.
        from_keys: estimator of values from keys; None: a token counts as the mean of its page.
        most: an upper bound of `room`.
    """
    keys, *rest = separate_kernels(keys, *rest)
    slots = jnp.arange(keys.shape[2])[None, None] < pages.count[..., None]
    flat, keys = slots.reshape(len(q), -1), keys.reshape(len(q), -1, q.shape[-1])
    near_scores = masked_scores(q, resident[0], resident[1][:, None], scoring=scoring)
    paged_scores = masked_scores(q, keys, flat[:, None], scoring=scoring)
    highest = jnp.maximum(jnp.maximum(near_scores.max(-1), paged_scores.max(-1)), rest[1])  # the rest may outweigh them
    near_weights, paged_weights = jnp.exp(near_scores - highest[..., None]), jnp.exp(paged_scores - highest[..., None])
    rest_weight = jnp.exp(rest[1] - highest)
    total = near_weights.sum(-1) + paged_weights.sum(-1) + rest_weight
    worth = jnp.where(flat, (paged_weights / total[..., None]).sum(1), -1.0)
    slot_ids, selected, (exact,) = best(worth, min(most, worth.shape[-1]), flat.astype(jnp.int32), room=room)
    exact = (exact > 0) & (jnp.arange(slot_ids.shape[-1])[None] < room[:, None])
    weights = jnp.where(
        exact[:, None], jnp.take_along_axis(paged_weights, slot_ids[:, None], axis=2, mode="promise_in_bounds"), 0.0
    )
    out = attend_tail(jnp.where(selected[:, None], 0.0, paged_weights), keys, slots, pages, from_keys)
    out += rest_weight[..., None] * rest[0]
    near_weights, weights, out = (x / total[..., None] for x in (near_weights, weights, out))
    return RankedTokens(slot_ids, exact, near_weights, weights, out, jnp.log(total) + highest)
