"""Re-ranking by key codes: among the pages chosen by digests, the tokens or pages with the largest softmax weight.

Policy Coded calls it before it fetches; R is B K, in one axis. Keys are decoded codes, so that nothing is fetched to rank.
"""

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
    """The result of re-ranking.

    Attributes:
        best: indices of the best slots among all P p slots, or of the best pages; best first, i32[R, M].
        counts: tokens of each, i32[R, M].
        tail: attention to all other tokens of these pages and to `rest`.
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
    """Returns the `wanted` slots of largest softmax weight, summed over query heads, and the attention to all other tokens.

    The other tokens of these pages count with their own weights; a value is estimated by its page's mean and its key (`tail`).

    Args:
        keys: decoded keys of the pages.
        pages: digests [R, P] of the pages.
        rest: attention f32[R, G, Hv], f32[R, G] to the tokens outside these pages.
        wanted: slots, or pages, to return.
        from_keys: estimator of values from keys; None: a token counts as the mean of its page.
        whole: whether to return the pages of largest weight instead of slots.
        guess: queries to choose by instead of `q`.
    """
    rows, shape = len(q), keys.shape[1:3]
    slots = jnp.arange(shape[1])[None, None] < pages.count[..., None]
    mask, keys = slots.reshape(rows, 1, -1), keys.reshape(rows, -1, keys.shape[-1])
    scores = masked_scores(q, keys, mask, scoring=scoring)
    choice_scores = scores if guess is None else masked_scores(guess, keys, mask, scoring=scoring)
    worth, *_ = _weights(choice_scores, rest.lse)
    worth, counts = worth.sum(1), slots.reshape(rows, -1).astype(jnp.int32)
    if whole:
        worth, counts = worth.reshape(rows, *shape).sum(-1), pages.count
    worth = jnp.where(counts > 0, worth, -1.0)
    best_indices, selected, (counts,) = best(worth, min(wanted, worth.shape[-1]), counts)
    selected = jnp.repeat(selected, shape[1], axis=1) if whole else selected
    weights, rest_weight, lse = _weights(jnp.where(selected[:, None], -jnp.inf, scores), rest.lse)
    out = attend_tail(weights, keys, slots, pages, from_keys)
    out = out[..., : rest.out.shape[-1]] + rest_weight[..., None] * rest.out  # values may be the first channels of keys
    return RerankedTokens(best_indices, counts, Attended(out, lse))


def _weights(scores: Float[Array, "R G S"], lse: Float[Array, "R G"]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the softmax weights of the slots and of the rest with log-sum-exp `lse`, and their joint log-sum-exp.

    Without any token, in the slots or in the rest, the weights are 0 and the log-sum-exp is -inf.
    """
    total = jnp.logaddexp(jax.nn.logsumexp(scores, axis=-1), lse)
    base = jnp.where(jnp.isneginf(total), 0.0, total)
    return jnp.exp(scores - base[..., None]), jnp.exp(lse - base), total
