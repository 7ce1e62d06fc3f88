"""k-means over vectors [*R, n, d]: centroids, the nearest centroid of each vector, and sums per centroid.

Page indexes with codes or clusters call it. It runs over the leading axes *R one after another, which bounds the memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from icejax.ops.attention.dense import EINSUM

TOGETHER = 256  # vectors at a time, so that their products with all centroids stay in a processor's cache


def kmeans(
    x: Float[Array, "*R n d"],
    there: Bool[Array, "*R n"],
    *,
    count: int,
    iterations: int,
    cosine: bool = False,
    few: Int[Array, "*R"] | None = None,
) -> Float[Array, "*R {count} d"]:
    """Returns the centroids of the vectors in `there`, in fp32, by Lloyd's iterations; zeros if no vector counts.

    The start is deterministic: evenly spaced vectors. Of 10 vectors and 4 centroids these are the vectors 0, 2, 5 and 7. In an
    iteration each vector is assigned to its nearest centroid, and a centroid becomes the mean of its vectors; a centroid
    without vectors stays. With fewer vectors than centroids each vector is a centroid. Memory: two arrays of n times
    `count` numbers, for one index of *R at a time.

    Args:
        there: which vectors count; the others may be anything.
        count: centroids.
        cosine: whether the nearest centroid has the smallest angle, not the smallest distance. Means are taken of unnormalised
            vectors, so that a centroid's length is the mean length of its vectors along it.
        few: how many of the centroids are used, at least one; the others are zero. None: all.
    """

    def fit(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        vectors, valid, limit = part
        vectors = jnp.where(valid[:, None], vectors, 0).astype(jnp.float32)
        number, n_valid = jnp.arange(count), valid.sum()
        # number * n_valid // limit, in 32 bits for any sizes: the last product is below 2^32.
        extra = (number.astype(jnp.uint32) * (n_valid % limit).astype(jnp.uint32) // limit.astype(jnp.uint32)).astype(jnp.int32)
        steps = number * (n_valid // limit) + extra
        first = jnp.minimum(jnp.searchsorted(jnp.cumsum(valid), steps + 1), len(valid) - 1)  # the valid vector of rank `steps`
        first = jnp.where(number[:, None] < limit, vectors[first], 0)

        def lloyd_step(_: jax.Array, centroids: jax.Array) -> jax.Array:
            total, size = _sums(vectors, _nearest(vectors, centroids, limit, cosine), valid, count)
            return jnp.where(size[:, None] > 0, total / jnp.maximum(size, 1)[:, None], centroids)

        return lax.fori_loop(0, iterations, lloyd_step, first)

    return _in_turns(fit, x, there, _limits(few, count, there))


def nearest(
    x: Float[Array, "*R n d"],
    centroids: Float[Array, "*R c d"],
    *,
    cosine: bool = False,
    few: Int[Array, "*R"] | None = None,
) -> Int[Array, "*R n"]:
    """Returns the index of each vector's nearest centroid, the first of equal ones; arguments as in `kmeans`."""
    limits = _limits(few, centroids.shape[-2], x[..., 0])
    return _in_turns(lambda part: _nearest(part[0].astype(jnp.float32), *part[1:], cosine), x, centroids, limits)


def sums(
    x: Float[Array, "*R n d"], codes: Int[Array, "*R n"], there: Bool[Array, "*R n"], *, count: int
) -> tuple[Float[Array, "*R {count} d"], Int[Array, "*R {count}"]]:
    """Returns for each of `count` codes the fp32 sum of its vectors in `there`, and their number."""
    total, size = _in_turns(lambda part: _sums(part[0].astype(jnp.float32), *part[1:], count), x, codes, there)
    return total, size.astype(jnp.int32)


def _in_turns(run, x: jax.Array, *arrays: jax.Array):
    """Maps `run` over the leading axes of `x` and `arrays`, one index at a time."""
    lead = x.shape[:-2]
    results = lax.map(run, tuple(y.reshape(-1, *y.shape[len(lead) :]) for y in (x, *arrays)))
    return jax.tree.map(lambda y: y.reshape(*lead, *y.shape[1:]), results)


def _limits(few: jax.Array | None, count: int, like: jax.Array) -> jax.Array:
    return jnp.full(like.shape[:-1], count, jnp.int32) if few is None else few


def _nearest(x: jax.Array, centroids: jax.Array, limit: jax.Array, cosine: bool) -> jax.Array:
    # The product minus half the square: XLA:CPU takes three times as long if the product is doubled instead.
    size = jnp.linalg.norm(centroids, axis=-1) if cosine else jnp.square(centroids).sum(-1) / 2
    number = jnp.arange(len(centroids), dtype=jnp.int32)

    def nearest_to(vector: jax.Array) -> jax.Array:
        closeness = EINSUM("cd,d->c", centroids, vector)
        closeness = closeness / jnp.maximum(size, 1e-30) if cosine else closeness - size
        closeness = jnp.where(number < limit, closeness, -jnp.inf)
        # The first of the nearest; XLA:CPU takes six times as long for an argmax.
        return jnp.where(closeness == closeness.max(), number, len(centroids) - 1).min()

    return lax.map(nearest_to, x, batch_size=TOGETHER)


def _sums(x: jax.Array, codes: jax.Array, valid: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    def products(x: jax.Array, codes: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        members = ((codes[:, None] == jnp.arange(count)[None]) & valid[:, None]).astype(jnp.float32)
        return EINSUM("nc,nd->cd", members, x), members.sum(0)

    def segment_sums(x: jax.Array, codes: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        ones = valid.astype(jnp.float32)
        addends = jnp.where(valid[:, None], x, 0), ones
        return tuple(jax.ops.segment_sum(y, codes, num_segments=count) for y in addends)

    # A GPU's scatter sums are not reproducible; a CPU's are, and take a tenth of the products' time.
    return lax.platform_dependent(x, codes, valid, cpu=segment_sums, default=products)
