"""Values from keys: a linear estimate of how a token's value differs from its page's mean, by least squares over a text.

The digest-tree index fits the matrix [B, K, H, Hv] to packed pages [B, K, P, p, H]; attention applies it to tokens and nodes
whose values are not fetched. MomentKV (arXiv 2606.01563) corrects the values of unattended tokens by a covariance of values and
keys per page. Here one matrix per KV head serves all pages: it needs no storage per page and no transfer, and is fitted to the
whole text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from icejax.ops.attention.dense import EINSUM

RIDGE = 0.1  # share of the channels' mean variance; the best of 0.01 to 1 on two models (bench/results/pages.md)
AT_ONCE = 64  # pages centred at a time; all at once would need an fp32 copy of the text


class Sums(NamedTuple):
    """Sums over tokens of products of keys and values, centred on the means of their pages; `*n` are axes of separate sums.

    Attributes:
        keys: products of keys with keys, f32[B, K, *n, H, H]: their scatter (`icejax.ops.pages.key_scatter`).
        values: products of keys with values, f32[B, K, *n, H, Hv]; None without values.
    """

    keys: jax.Array
    values: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ValueFit:
    """The matrix of each KV head, and the sums it is computed from.

    Attributes:
        values: sums of products of centred keys with centred values, over all tokens so far, f32[B, K, H, Hv].
        agreement: sums over tokens of prediction times value, and of prediction squared, f32[B, K, 2]; a token is predicted by
            a matrix fitted to other tokens.
        matrix: takes a key minus the mean key to the estimate of its value minus the mean value, f32[B, K, H, Hv]. It is
            multiplied by the ratio of the two sums of `agreement`, clipped to 0 to 1: 0 if values are unrelated to keys.
    """

    values: jax.Array
    agreement: jax.Array
    matrix: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FromKeys:
    """The estimator of values from keys, for differences from a mean.

    Attributes:
        matrix: the matrix of a fit, f32[*R, H, Hv]; None where values are channels of the keys.
    """

    matrix: jax.Array | None

    def __call__(self, keys: Float[Array, "*R G H"]) -> Float[Array, "*R G _"]:
        """Returns the estimated values; `keys` themselves where values are channels of the keys."""
        return keys if self.matrix is None else EINSUM("...gh,...hv->...gv", keys, self.matrix)


def empty_fit(batch: int, heads: int, size: int, value_size: int) -> ValueFit:
    """Returns the fit before any text, which estimates every value by the mean."""
    zeros = jnp.zeros((batch, heads, size, value_size))
    return ValueFit(zeros, jnp.zeros((batch, heads, 2)), zeros)


def page_sums(k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]) -> Sums:
    """Returns two sums (`*n` = 2), over the tokens of even pages and of odd pages; slots outside `mask` are not read."""
    at_once = min(AT_ONCE, k.shape[2] + k.shape[2] % 2)
    missing = -k.shape[2] % at_once
    pages = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 3)), (k, v, mask))

    def add(i: jax.Array, sums: Sums) -> Sums:
        *planes, slots = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * at_once, at_once, axis=2), pages)
        centred = jax.tree.map(lambda x: _centred(x, slots), Sums(*planes))

        def products(x: jax.Array) -> jax.Array:
            return jnp.stack([EINSUM("bkpsh,bkpsi->bkhi", centred.keys[:, :, n::2], x[:, :, n::2]) for n in (0, 1)], axis=2)

        return jax.tree.map(lambda total, x: total + products(x), sums, centred)

    shape = (*k.shape[:2], 2, k.shape[-1])
    zeros = jax.tree.map(lambda x: jnp.zeros((*shape, x.shape[-1])), Sums(k, v))
    return jax.lax.fori_loop(0, pages[0].shape[2] // at_once, add, zeros)


def update_fit(fit: ValueFit, scatter: Float[Array, "B K H H"], new: Sums) -> ValueFit:
    """Returns the fit with new pages added.

    The agreement is measured on tokens that the predicting matrix was not fitted to: a matrix of all earlier tokens and the new
    odd pages predicts the new even pages, and a matrix of all earlier tokens and the new even pages predicts the odd ones.

    Args:
        scatter: sums of products of keys over all earlier tokens.
        new: sums of the new pages, from `page_sums`.
    """
    before = Sums(scatter, fit.values)
    total = Sums(*(x[:, :, None] for x in before))
    matrices = _ridge_solution(jax.tree.map(lambda old, x: old + x[:, :, ::-1], total, new))
    explained = EINSUM("bknhv,bknhv->bk", matrices, new.values)
    predicted = EINSUM("bknhv,bknhv->bk", matrices, EINSUM("bknhi,bkniv->bknhv", new.keys, matrices))
    agreement = fit.agreement + jnp.stack([explained, predicted], axis=-1)
    trust = jnp.clip(agreement[..., 0] / jnp.maximum(agreement[..., 1], 1e-30), 0.0, 1.0)
    sums = jax.tree.map(lambda old, x: old + x.sum(2), before, new)
    matrix = _ridge_solution(sums) * trust[..., None, None]
    return ValueFit(sums.values, agreement, jnp.where(jnp.isfinite(matrix), matrix, 0.0))  # 0 if squares of keys overflow


def _centred(x: Float[Array, "B K P p H"], mask: Bool[Array, "B K P p"]) -> Float[Array, "B K P p H"]:
    x = jnp.where(mask[..., None], x, 0).astype(jnp.float32)
    mean = x.sum(3, keepdims=True) / jnp.maximum(mask.sum(-1, dtype=jnp.float32), 1.0)[..., None, None]
    return jnp.where(mask[..., None], x - mean, 0)


def _ridge_solution(sums: Sums) -> Float[Array, "B K *n H Hv"]:
    """Returns the matrices of ridge regression; 0 without tokens.

    By Gauss-Jordan elimination without pivoting, which the ridge makes safe. LAPACK's calls wait for threads of the pool that
    they run in: two calls at once have deadlocked XLA:CPU on two cores.
    """
    size = sums.keys.shape[-1]
    ridge = jnp.maximum(RIDGE / size * jnp.trace(sums.keys, axis1=-2, axis2=-1), 1e-20)
    channels = jnp.arange(size)
    system = jnp.concatenate([sums.keys.at[..., channels, channels].add(ridge[..., None]), sums.values], axis=-1)

    def eliminate(i: jax.Array, x: jax.Array) -> jax.Array:
        row, column = (jax.lax.dynamic_slice_in_dim(x, i, 1, axis=x.ndim + axis) for axis in (-2, -1))
        row = row / jax.lax.dynamic_slice_in_dim(row, i, 1, axis=x.ndim - 1)
        is_row = (channels == i).reshape(*(1,) * (x.ndim - 2), size, 1)
        return jnp.where(is_row, row, x - column * row)

    return jax.lax.fori_loop(0, size, eliminate, system)[..., size:]
