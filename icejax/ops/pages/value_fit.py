"""Values from keys: what a token's key tells of its value beyond the mean of its page, by least squares over a text.

MomentKV (arXiv 2606.01563) corrects the value of what is not attended by a covariance of values and keys per page. Here one
matrix per KV head serves all pages: it costs nothing per page and no transfer, and has the whole text to be learnt from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from icejax.ops.attention.dense import EINSUM

RIDGE = 0.1  # of the mean variance of a channel; of 0.01 to 1 the best on two models (bench/results/pages.md)
AT_ONCE = 64  # pages that are centred at once: all of a long text would be a copy of it in fp32


class Sums(NamedTuple):
    """Sums over tokens, keys and values as they differ from the means of their pages; `n` is one or more sums.

    Attributes:
        keys: f32[B, K, *n, H, H] of products of keys with keys: their scatter (`icejax.ops.pages.key_scatter`).
        values: f32[B, K, *n, H, Hv] of products of keys with values; None: of no values.
    """

    keys: jax.Array
    values: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ValueFit:
    """The matrix of a KV head, and what it is made of.

    Attributes:
        values: sums of products of keys with values, of all tokens so far, f32[B, K, H, Hv].
        agreement: what the matrices of other tokens explained of each token's value, and what they said of it, f32[B, K, 2].
        matrix: f32[B, K, H, Hv], by which a key's difference from the mean key is multiplied to be its value's. Shrunk as far
            as values are not what a matrix of other tokens says, to 0 if they have nothing to do with keys.
    """

    values: jax.Array
    agreement: jax.Array
    matrix: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FromKeys:
    """What differences of keys are as values.

    Attributes:
        matrix: f32[*R, H, Hv] of a fit; None where values are channels of the keys.
    """

    matrix: jax.Array | None

    def __call__(self, keys: Float[Array, "*R G H"]) -> Float[Array, "*R G _"]:
        """Returns them, of whole keys where values are channels of them."""
        return keys if self.matrix is None else EINSUM("...gh,...hv->...gv", keys, self.matrix)


def unfitted(batch: int, heads: int, size: int, value_size: int) -> ValueFit:
    """Returns the fit of no text, by which every value is the mean."""
    nothing = jnp.zeros((batch, heads, size, value_size))
    return ValueFit(nothing, jnp.zeros((batch, heads, 2)), nothing)


def sums_of(k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]) -> Sums:
    """Returns the sums over the tokens of even pages and of odd ones; slots outside `mask` are not read."""
    at_once = min(AT_ONCE, k.shape[2] + k.shape[2] % 2)
    missing = -k.shape[2] % at_once
    pages = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 3)), (k, v, mask))

    def add(i: jax.Array, sums: Sums) -> Sums:
        *both, there = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * at_once, at_once, axis=2), pages)
        both = jax.tree.map(lambda x: _centred(x, there), Sums(*both))

        def products(x: jax.Array) -> jax.Array:
            return jnp.stack([EINSUM("bkpsh,bkpsi->bkhi", both.keys[:, :, n::2], x[:, :, n::2]) for n in (0, 1)], axis=2)

        return jax.tree.map(lambda total, x: total + products(x), sums, both)

    shape = (*k.shape[:2], 2, k.shape[-1])
    nothing = jax.tree.map(lambda x: jnp.zeros((*shape, x.shape[-1])), Sums(k, v))
    return jax.lax.fori_loop(0, pages[0].shape[2] // at_once, add, nothing)


def fitted(fit: ValueFit, scatter: Float[Array, "B K H H"], new: Sums) -> ValueFit:
    """Returns the fit, of keys whose scatter was this, with the `sums_of` more pages.

    How far it is trusted is measured on tokens that a matrix was not made of: the new even pages by one of all tokens before
    and the new odd pages, and the odd by the even.
    """
    before = Sums(scatter, fit.values)
    total = Sums(*(x[:, :, None] for x in before))
    told = _solved(jax.tree.map(lambda old, x: old + x[:, :, ::-1], total, new))
    explained = EINSUM("bknhv,bknhv->bk", told, new.values)
    said = EINSUM("bknhv,bknhv->bk", told, EINSUM("bknhi,bkniv->bknhv", new.keys, told))
    agreement = fit.agreement + jnp.stack([explained, said], axis=-1)
    trust = jnp.clip(agreement[..., 0] / jnp.maximum(agreement[..., 1], 1e-30), 0.0, 1.0)
    sums = jax.tree.map(lambda old, x: old + x.sum(2), before, new)
    matrix = _solved(sums) * trust[..., None, None]
    return ValueFit(sums.values, agreement, jnp.where(jnp.isfinite(matrix), matrix, 0.0))  # of keys whose squares overflow


def _centred(x: Float[Array, "B K P p H"], mask: Bool[Array, "B K P p"]) -> Float[Array, "B K P p H"]:
    x = jnp.where(mask[..., None], x, 0).astype(jnp.float32)
    mean = x.sum(3, keepdims=True) / jnp.maximum(mask.sum(-1, dtype=jnp.float32), 1.0)[..., None, None]
    return jnp.where(mask[..., None], x - mean, 0)


def _solved(sums: Sums) -> Float[Array, "B K *n H Hv"]:
    """Returns the matrices of ridge regression; 0 of no tokens.

    By elimination without pivots, which the ridge makes safe. LAPACK's calls wait for threads of the pool that they run in: two
    of them at once have stopped XLA:CPU for good on two cores.
    """
    size = sums.keys.shape[-1]
    ridge = jnp.maximum(RIDGE / size * jnp.trace(sums.keys, axis1=-2, axis2=-1), 1e-20)
    channels = jnp.arange(size)
    both = jnp.concatenate([sums.keys.at[..., channels, channels].add(ridge[..., None]), sums.values], axis=-1)

    def eliminate(i: jax.Array, x: jax.Array) -> jax.Array:
        row, column = (jax.lax.dynamic_slice_in_dim(x, i, 1, axis=x.ndim + axis) for axis in (-2, -1))
        row = row / jax.lax.dynamic_slice_in_dim(row, i, 1, axis=x.ndim - 1)
        own = (channels == i).reshape(*(1,) * (x.ndim - 2), size, 1)
        return jnp.where(own, row, x - column * row)

    return jax.lax.fori_loop(0, size, eliminate, both)[..., size:]
