"""The covariance of a page's keys, from two parts: widths stored per page, and one scatter matrix per KV head for all pages.

A page stores its mean squared deviation in a few bands of channels. How channels differ within a band, and how they correlate,
is much the same in all pages of a head: the scatter matrix [B, K, H, H] holds it (bench/results/pages.md). Digests and the tree
walk combine both to score pages.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.ops.attention.dense import Scoring, products

BANDS = 8  # 4 or 16 left the same error
SHRUNK = 0.5  # share of the correlations that is dropped; at 0 one of five models had 10% more error from 16,384 tokens on
NO_TEXT = 1e-20  # scatter added to every channel, so that all channels are alike before any text


class Along(NamedTuple):
    """The covariance of a page's keys applied to queries, for a page of width 1.

    Attributes:
        moved: how far softmax weights move the page's mean key, to first order: the scale times the covariance times q.
        variance: variance of the keys' scores that comes from each band.
    """

    moved: jax.Array  # f32[B, K, G, H]
    variance: jax.Array  # f32[B, K, G, n]


def bands(size: int) -> int:
    """Returns the number of bands of keys with `size` channels."""
    return math.gcd(BANDS, size // _halves(size))


def widths(squares: Float[Array, "*R H"]) -> Float[Array, "*R n"]:
    """Returns the sums over each band: the channels of both halves that RoPE rotates at about the same rate.

    With H = 128 there are 8 bands, and band 0 holds the channels 0 to 7 and 64 to 71. They stay finite if squares overflow.
    """
    size = squares.shape[-1]
    in_bands = jnp.minimum(squares, 1e36).reshape(*squares.shape[:-1], _halves(size), bands(size), -1)
    return in_bands.sum((-3, -1))


def _halves(size: int) -> int:
    return 2 - size % 2


def along(q: Float[Array, "B K G H"], scatter: Float[Array, "B K H H"], *, scoring: Scoring) -> Along:
    """Returns the covariance of pages applied to queries.

    Args:
        scatter: sum over tokens of c c^T, where c is the token's key minus the mean key of its page.
    """
    scaled = q.astype(jnp.float32) * scoring.scale
    variances = jnp.diagonal(scatter, axis1=-2, axis2=-1)[:, :, None] + NO_TEXT
    moved = (1 - SHRUNK) * (products(scaled, scatter) + NO_TEXT * scaled) + SHRUNK * variances * scaled
    return Along(moved / variances.sum(-1, keepdims=True), widths(jnp.square(scaled) * variances) / widths(variances))


def add_scatter(scatter: Float[Array, "B K H H"], new: Float[Array, "B K H H"]) -> Float[Array, "B K H H"]:
    """Returns the scatter with `new` added; 0 for a head whose sums overflow."""
    scatter += new
    finite = jnp.isfinite(jnp.trace(scatter, axis1=-2, axis2=-1))
    return jnp.where(finite[..., None, None], scatter, 0.0)
