"""A second look: of pages that digests chose the tokens that a query needs, or the pages that hold them, by codes of keys."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.ops.attention.dense import Attended, Scoring, masked_scores
from icejax.ops.pages.digests import Digests
from icejax.ops.pages.tail import attend_tail
from icejax.ops.pages.value_fit import FromKeys
from icejax.ops.topk import best


class RerankedTokens(NamedTuple):
    """What a second look found.

    Attributes:
        best: indices of the best slots, which stand one behind another, or of the best pages; best first, i32[R, M].
        counts: tokens of each.
        tail: attention to all others, and to what the pages were chosen among.
    """

    best: jax.Array
    counts: jax.Array
    tail: Attended


def rerank_by_codes(
    q: Float[Array, "R G H"],
    keys: Float[Array, "R P p H"],
    pages: Digests,
    rest: Attended,
    from_keys: FromKeys | None,
    *,
    scoring: Scoring,
    wanted: int,
    whole: bool = False,
    guess: Float[Array, "R G H"] | None = None,
) -> RerankedTokens:
    """Returns the `wanted` slots of largest softmax weight, summed over query heads, and what all others contribute.

    Others weigh what their keys say; their values are the mean of their page's and what keys tell of values.

    Args:
        keys: of the pages, about what they are.
        pages: their digests [R, P].
        rest: attention f32[R, G, Hv], f32[R, G] to what is not in these pages.
        from_keys: values from keys; None: they count as their mean.
        whole: whether to return pages in the place of slots, those of largest weight.
        guess: queries to choose by in the place of `q`.
    """
    rows, shape = len(q), keys.shape[1:3]
    slots = jnp.arange(shape[1])[None, None] < pages.count[..., None]
    mask, keys = slots.reshape(rows, 1, -1), keys.reshape(rows, -1, keys.shape[-1])
    scores = masked_scores(q, keys, mask, scoring=scoring)
    asked = scores if guess is None else masked_scores(guess, keys, mask, scoring=scoring)
    worth, *_ = _weights(asked, rest.lse)
    worth, counts = worth.sum(1), slots.reshape(rows, -1).astype(jnp.int32)
    if whole:
        worth, counts = worth.reshape(rows, *shape).sum(-1), pages.count
    worth = jnp.where(counts > 0, worth, -1.0)
    found, taken, (counts,) = best(worth, min(wanted, worth.shape[-1]), counts)
    taken = jnp.repeat(taken, shape[1], axis=1) if whole else taken
    weights, others, base = _weights(jnp.where(taken[:, None], -jnp.inf, scores), rest.lse)
    out = attend_tail(weights, keys, slots, pages, from_keys)
    out = out[..., : rest.out.shape[-1]] + others[..., None] * rest.out  # values may be the first channels of keys
    return RerankedTokens(found, counts, Attended(out, base))


def _weights(scores: Float[Array, "R G S"], lse: Float[Array, "R G"]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the softmax weights of slots and of what has the log-sum-exp, and the log-sum-exp of all; 0 of nothing."""
    whole = jnp.logaddexp(jax.nn.logsumexp(scores, axis=-1), lse)
    base = jnp.where(jnp.isneginf(whole), 0.0, whole)
    return jnp.exp(scores - base[..., None]), jnp.exp(lse - base), whole
