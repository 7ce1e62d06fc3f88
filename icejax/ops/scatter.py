"""How keys lie about the means of their pages: one matrix per KV head, of which a page's width says how much it has.

The channels of keys go together, and in all pages of a head alike: their scatter matrix tells how far a page's keys lie along
a query better than a variance per page and channel does (bench/results/pages.md), for one number per page.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.ops.attention import EINSUM, Scoring

NO_TEXT = 1e-20  # of scatter, along every channel: before there is any text all are alike


class Along(NamedTuple):
    """What a page of width 1 is along queries.

    Attributes:
        moved: how far softmax moves its mean key, to first order: s times the covariance times q.
        variance: of the scores of its keys.
    """

    moved: jax.Array  # f32[B, K, G, H]
    variance: jax.Array  # f32[B, K, G]


def along(q: Float[Array, "B K G H"], scatter: Float[Array, "B K H H"], *, scoring: Scoring) -> Along:
    """Returns what pages are along queries, as keys scatter: sums of products of keys as they differ from the page's mean."""
    scaled, size = q.astype(jnp.float32) * scoring.scale, q.shape[-1]
    width = jnp.trace(scatter, axis1=-2, axis2=-1)[..., None, None]
    finite = jnp.isfinite(width)  # the squares of garbage overflow
    moved = EINSUM("bkgh,bkhi->bkgi", scaled, jnp.where(finite, scatter, 0.0)) + NO_TEXT * scaled
    moved /= jnp.where(finite, width, 0.0) + size * NO_TEXT
    return Along(moved, EINSUM("bkgh,bkgh->bkg", moved, scaled))
