"""k-means over vectors, and which centroid each is nearest to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from icejax.ops.attention import EINSUM


def kmeans(
    x: Float[Array, "*R n d"], there: Bool[Array, "*R n"], *, count: int, iterations: int, cosine: bool = False
) -> Float[Array, "*R {count} d"]:
    """Returns centroids of the vectors that are `there`, in fp32, by Lloyd's iterations; of none, zeros.

    The first centroids are vectors at even steps from the first on: nothing is drawn. Then each vector goes to its nearest
    centroid, which becomes the mean of those that came; one to which none came stays. Fewer vectors than centroids are their
    own. In turns over all but the last two axes: one holds two arrays of n times `count` numbers.

    Args:
        count: centroids.
        cosine: whether the nearest is the one of the smallest angle, not of the smallest distance. The mean is of the vectors
            as they are, so that a centroid is as long as they are in its direction.
    """

    def one(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        vectors, valid = part
        vectors = jnp.where(valid[:, None], vectors, 0).astype(jnp.float32)
        number, found = jnp.arange(count), valid.sum()
        # number * found // count, in int32 for any sizes.
        steps = number * (found // count) + number * (found % count) // count
        first = vectors[jnp.argsort(~valid, stable=True)[steps]]

        def better(_: jax.Array, centroids: jax.Array) -> jax.Array:
            codes = _nearest(vectors, centroids, cosine)
            members = ((codes[:, None] == number[None]) & valid[:, None]).astype(jnp.float32)
            size = members.sum(0)[:, None]
            return jnp.where(size > 0, EINSUM("nc,nd->cd", members, vectors) / jnp.maximum(size, 1), centroids)

        return lax.fori_loop(0, iterations, better, first)

    found = lax.map(one, (x.reshape(-1, *x.shape[-2:]), there.reshape(-1, there.shape[-1])))
    return found.reshape(*x.shape[:-2], *found.shape[1:])


def nearest(x: Float[Array, "*R n d"], centroids: Float[Array, "*R c d"], *, cosine: bool = False) -> Int[Array, "*R n"]:
    """Returns which centroid each vector is nearest to, the first of equal ones; in turns too."""
    parts = (y.reshape(-1, *y.shape[-2:]) for y in (x, centroids))
    found = lax.map(lambda part: _nearest(part[0].astype(jnp.float32), part[1], cosine), tuple(parts))
    return found.reshape(x.shape[:-1])


def _nearest(x: jax.Array, centroids: jax.Array, cosine: bool) -> jax.Array:
    products = EINSUM("nd,cd->nc", x, centroids)
    if cosine:
        near = products / jnp.maximum(jnp.linalg.norm(centroids, axis=-1), 1e-30)[None]
    else:
        near = 2 * products - jnp.square(centroids).sum(-1)[None]
    return near.argmax(-1).astype(jnp.int32)
