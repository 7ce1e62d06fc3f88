"""k-means over vectors, which centroid each is nearest to, and the sums of those of each; in turns, which bounds the memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from icejax.ops.attention.dense import EINSUM

TOGETHER = 256  # vectors whose products with all centroids stay in a processor's cache


def kmeans(
    x: Float[Array, "*R n d"],
    there: Bool[Array, "*R n"],
    *,
    count: int,
    iterations: int,
    cosine: bool = False,
    few: Int[Array, "*R"] | None = None,
) -> Float[Array, "*R {count} d"]:
    """Returns centroids of the vectors that are `there`, in fp32, by Lloyd's iterations; of none, zeros.

    The first centroids are vectors at even steps from the first on: nothing is drawn. Then each vector goes to its nearest
    centroid, which becomes the mean of those that came; one to which none came stays. Fewer vectors than centroids are their
    own. One turn, of all but the last two axes, holds two arrays of n times `count` numbers.

    Args:
        count: centroids.
        cosine: whether the nearest is the one of the smallest angle, not of the smallest distance. The mean is of the vectors
            as they are, so that a centroid is as long as they are in its direction.
        few: how many of the centroids there are, at least one; the others are zero. None: all.
    """

    def one(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        vectors, valid, limit = part
        vectors = jnp.where(valid[:, None], vectors, 0).astype(jnp.float32)
        number, found = jnp.arange(count), valid.sum()
        # number * found // limit, in 32 bits for any sizes: the last product is below 2^32.
        left = (number.astype(jnp.uint32) * (found % limit).astype(jnp.uint32) // limit.astype(jnp.uint32)).astype(jnp.int32)
        steps = number * (found // limit) + left
        first = jnp.minimum(jnp.searchsorted(jnp.cumsum(valid), steps + 1), len(valid) - 1)  # so many are there up to it
        first = jnp.where(number[:, None] < limit, vectors[first], 0)

        def better(_: jax.Array, centroids: jax.Array) -> jax.Array:
            total, size = _sums(vectors, _nearest(vectors, centroids, limit, cosine), valid, count)
            return jnp.where(size[:, None] > 0, total / jnp.maximum(size, 1)[:, None], centroids)

        return lax.fori_loop(0, iterations, better, first)

    return _in_turns(one, x, there, _limits(few, count, there))


def nearest(
    x: Float[Array, "*R n d"],
    centroids: Float[Array, "*R c d"],
    *,
    cosine: bool = False,
    few: Int[Array, "*R"] | None = None,
) -> Int[Array, "*R n"]:
    """Returns which centroid each vector is nearest to, the first of equal ones, as `kmeans` has it."""
    limits = _limits(few, centroids.shape[-2], x[..., 0])
    return _in_turns(lambda part: _nearest(part[0].astype(jnp.float32), *part[1:], cosine), x, centroids, limits)


def sums(
    x: Float[Array, "*R n d"], codes: Int[Array, "*R n"], there: Bool[Array, "*R n"], *, count: int
) -> tuple[Float[Array, "*R {count} d"], Int[Array, "*R {count}"]]:
    """Returns the sums in fp32 of the vectors that have each of `count` codes, and how many have it."""
    total, size = _in_turns(lambda part: _sums(part[0].astype(jnp.float32), *part[1:], count), x, codes, there)
    return total, size.astype(jnp.int32)


def _in_turns(one, x: jax.Array, *others: jax.Array):
    """Returns what `one` makes of each of the leading axes of `x`, which the others have too."""
    lead = x.shape[:-2]
    found = lax.map(one, tuple(y.reshape(-1, *y.shape[len(lead) :]) for y in (x, *others)))
    return jax.tree.map(lambda y: y.reshape(*lead, *y.shape[1:]), found)


def _limits(few: jax.Array | None, count: int, like: jax.Array) -> jax.Array:
    return jnp.full(like.shape[:-1], count, jnp.int32) if few is None else few


def _nearest(x: jax.Array, centroids: jax.Array, limit: jax.Array, cosine: bool) -> jax.Array:
    # Half of the square beside the product as it is: XLA:CPU takes three times as long where the product is doubled.
    size = jnp.linalg.norm(centroids, axis=-1) if cosine else jnp.square(centroids).sum(-1) / 2
    number = jnp.arange(len(centroids), dtype=jnp.int32)

    def one(vector: jax.Array) -> jax.Array:
        near = EINSUM("cd,d->c", centroids, vector)
        near = near / jnp.maximum(size, 1e-30) if cosine else near - size
        near = jnp.where(number < limit, near, -jnp.inf)
        # The first of the nearest; XLA:CPU takes six times as long for an argmax.
        return jnp.where(near == near.max(), number, len(centroids) - 1).min()

    return lax.map(one, x, batch_size=TOGETHER)


def _sums(x: jax.Array, codes: jax.Array, valid: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    def products(x: jax.Array, codes: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        members = ((codes[:, None] == jnp.arange(count)[None]) & valid[:, None]).astype(jnp.float32)
        return EINSUM("nc,nd->cd", members, x), members.sum(0)

    def scattered(x: jax.Array, codes: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        there = valid.astype(jnp.float32)
        each = jnp.where(valid[:, None], x, 0), there
        return tuple(jax.ops.segment_sum(y, codes, num_segments=count) for y in each)

    # A scatter's sum on a GPU would not be the same twice; on a CPU it is, and takes a tenth of the time.
    return lax.platform_dependent(x, codes, valid, cpu=scattered, default=products)
