"""A second look: of pages that digests chose the tokens that a query needs, by the codes of their keys."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.ops.attention import EINSUM, Attended, Scoring, masked_scores
from icejax.ops.digests import Digests, weighted
from icejax.ops.topk import best
from icejax.ops.value_fit import FromKeys


class Looked(NamedTuple):
    """What a second look found.

    Attributes:
        tokens: indices of the best slots of the pages, one behind another, best first; i32[R, M].
        there: whether a slot holds a token; bool[R, M].
        rest: attention to all others, and to what the pages were chosen among.
    """

    tokens: jax.Array
    there: jax.Array
    rest: Attended


def second_look(
    q: Float[Array, "R G H"],
    keys: Float[Array, "R P p H"],
    pages: Digests,
    rest: Attended,
    from_keys: FromKeys | None,
    *,
    scoring: Scoring,
    wanted: int,
    guess: Float[Array, "R G H"] | None = None,
) -> Looked:
    """Returns the `wanted` slots of largest softmax weight, summed over query heads, and what all others contribute.

    These weigh what their keys say; their values are the mean of their page's and what keys tell of values.

    Args:
        keys: of the pages, about what they are.
        pages: their digests [R, P].
        rest: attention f32[R, G, Hv], f32[R, G] to what is not in these pages.
        from_keys: values from keys; None: they count as their mean.
        guess: queries to choose by in the place of `q`.
    """
    rows, group, _ = q.shape
    shape = keys.shape[1:3]
    slots = jnp.arange(shape[1])[None, None] < pages.count[..., None]
    mask, keys = slots.reshape(rows, 1, -1), keys.reshape(rows, -1, keys.shape[-1])
    scores = masked_scores(q, keys, mask, scoring=scoring)
    asked = scores if guess is None else masked_scores(guess, keys, mask, scoring=scoring)
    worth, _, _ = _weights(asked, rest.lse)
    worth = jnp.where(mask[:, 0], worth.sum(1), -1.0)
    tokens, taken, (there,) = best(worth, min(wanted, worth.shape[-1]), mask[:, 0].astype(jnp.int32))
    weights, others, base = _weights(jnp.where(taken[:, None], -jnp.inf, scores), rest.lse)
    by_page = weights.reshape(rows, group, *shape).sum(-1)
    alike = by_page / jnp.maximum(pages.count.astype(jnp.float32), 1.0)[:, None]
    apart = weights - jnp.where(slots[:, None], alike[..., None], 0.0).reshape(weights.shape)
    out = _of_pages(by_page, pages)
    if from_keys is not None:
        out += from_keys(EINSUM("rgs,rsh->rgh", apart.astype(keys.dtype), keys))
    out = out[..., : rest.out.shape[-1]] + others[..., None] * rest.out  # values may be the first channels of keys
    return Looked(tokens, there > 0, Attended(out, base))


def _weights(scores: Float[Array, "R G S"], lse: Float[Array, "R G"]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the softmax weights of slots and of what has the log-sum-exp, and the log-sum-exp of all; 0 of nothing."""
    whole = jnp.logaddexp(jax.nn.logsumexp(scores, axis=-1), lse)
    base = jnp.where(jnp.isneginf(whole), 0.0, whole)
    return jnp.exp(scores - base[..., None]), jnp.exp(lse - base), whole


def _of_pages(weights: Float[Array, "R G P"], pages: Digests) -> Float[Array, "R G _"]:
    batched = jax.tree.map(lambda x: x[:, None], (weights, pages))
    return weighted(*batched)[:, 0]
