"""Digests: the device-side summary of each page, and the score of a page for a query from its digest alone.

The digest tree builds digests from pages [B, K, P, p, H] and merges them; its walk scores them with queries [B, K, G, H].
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from icejax.ops.attention.dense import EINSUM, Scoring, products
from icejax.ops.pages.key_scatter import Along, bands, widths
from icejax.ops.quantized.rounding import dequantize, quantize

TAIL_CLAMP = 3.0  # nats; unclamped, the second-order term of a wide page overstates its weight without bound
TIED = 0.9999  # keys whose distances differ by rounding alone count as equally far; the first is the outlier
PART = 64  # pages whose values one program of a GPU sums
OUTLIERS = 2  # per page; with one, sharp heads of one model of five had twice the error
NARROW = ("int8", "float8_e4m3fn")  # dtypes of digests besides the model's own
Score = Literal["second-order", "mean"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Vectors:
    """One vector per page, in a dtype of the model or in a narrow dtype with a scale per vector.

    Attributes:
        data: the vectors, or their codes.
        scale: scale of each vector; None if `data` holds the vectors themselves.
    """

    data: jax.Array  # dtype[..., H]
    scale: jax.Array | None  # f32[...]

    @staticmethod
    def store(x: Float[Array, "... H"], dtype: str | jnp.dtype) -> Vectors:
        """Returns `x` rounded to `dtype`; numbers beyond its range stay finite."""
        if str(dtype) not in NARROW:
            largest = float(jnp.finfo(dtype).max)
            return Vectors(jnp.clip(x, -largest, largest).astype(dtype), None)
        codes, scale = quantize(jnp.clip(x.astype(jnp.float32), -3e38, 3e38), dtype, axis=-1)
        return Vectors(codes, scale[..., 0])

    def read(self) -> Float[Array, "... H"]:
        """Returns the vectors in fp32."""
        return self.data.astype(jnp.float32) if self.scale is None else dequantize(self.data, self.scale[..., None])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Digests:
    """Digests of pages, or of nodes: runs of neighbouring pages.

    A page with the one-channel keys 0, 1, 2 and 9 has count 4, outliers 9 and 0, mean 1.5 and width 0.25.

    Attributes:
        count: tokens; 0 for an empty page.
        outliers: a page's two keys farthest from the mean of all its keys; a node's two farthest among its pages' outliers.
        mean: mean of the inliers, which are the keys other than outliers; mean of all keys in a page of two or fewer.
        width: mean squared distance from `mean` of the keys that it averages, per band (`icejax.ops.pages.key_scatter`).
        value: mean value of all tokens; None where the keys hold the values.
    """

    count: jax.Array  # i32[B, K, P]
    outliers: tuple[Vectors, ...]
    mean: Vectors
    width: jax.Array  # f32[B, K, P, n]
    value: Vectors | None


def empty(shape: tuple[int, ...], size: int, value_size: int | None, dtype: str) -> Digests:
    """Returns the digests of empty pages, for keys of `size` channels and values of `value_size`; None: without values."""
    zeros = Vectors.store(jnp.zeros((*shape, size)), dtype)
    value = None if value_size is None else Vectors.store(jnp.zeros((*shape, value_size)), dtype)
    width = jnp.zeros((*shape, bands(size)))
    return Digests(jnp.zeros(shape, jnp.int32), (zeros,) * OUTLIERS, zeros, width, value)


def put(pages: Digests, new: Digests, first: Int[Array, ""]) -> Digests:
    """Returns the digests `pages` with `new` ones written from page `first` on."""
    return jax.tree.map(lambda old, x: jax.lax.dynamic_update_slice_in_dim(old, x, first, axis=2), pages, new)


def digest(
    k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"], dtype: str | None = None
) -> Digests:
    """Returns the digests of pages, in `dtype` or else that of `k`; slots outside `mask` are not read."""
    keys, values = jax.tree.map(lambda x: Vectors(jnp.where(mask[..., None], x, 0).astype(jnp.float32), None), (k, v))
    zero_width = jnp.zeros((*k.shape[:-1], bands(k.shape[-1])))
    # A page is merged from the digests of its single tokens.
    tokens = Digests(mask.astype(jnp.int32), (keys,), keys, zero_width, values)
    return merge(tokens, dtype or k.dtype)


def merge(parts: Digests, dtype: str | jnp.dtype | None = None) -> Digests:
    """Returns the digests of nodes from their pages' digests: arrays [B, K, P, fan-out, ...] become [B, K, P, ...].

    Exact except for rounding to `dtype`, by default the dtype of `parts`. Widths merge by the parallel-axis rule. A page's
    outlier that is no outlier of the node becomes an inlier: the pages 0, 1, 2, 9 and 10, 12, 13, 20, with outliers (9, 0) and
    (20, 10), make a node with the outliers (20, 0), and 9 and 10 enter its mean and width.
    """
    outliers, mean = jnp.stack([x.read() for x in parts.outliers], axis=-2), parts.mean.read()
    valid, inliers = distinct_outliers(parts.count, len(parts.outliers)), _num_inliers(parts.count)
    outliers, valid = (x.reshape(*x.shape[:3], -1, *x.shape[5:]) for x in (outliers, valid))
    count = parts.count.sum(-1, dtype=jnp.int32)
    chosen, rest = _split_outliers(outliers, valid, _mean((inliers, mean), (valid, outliers)))
    added = jnp.where((count <= OUTLIERS)[..., None], valid, rest)  # outliers of the parts that enter the mean
    centre = _mean((inliers, mean), (added, outliers))
    wide, far = (widths(jnp.square(x - centre[..., None, :])) for x in (mean, outliers))  # squared offsets from the centre
    inliers, added = (x / jnp.maximum((inliers.sum(-1) + added.sum(-1))[..., None], 1.0) for x in (inliers, added))
    width = EINSUM("bkps,bkpsn->bkpn", inliers, parts.width + wide) + EINSUM("bkps,bkpsn->bkpn", added, far)
    value = None if parts.value is None else _mean((parts.count.astype(jnp.float32), parts.value.read()))
    chosen, centre, value = jax.tree.map(lambda x: Vectors.store(x, dtype or parts.mean.data.dtype), (chosen, centre, value))
    return Digests(count, chosen, centre, width, value)


def distinct_outliers(count: Int[Array, "*P"], outliers: int = OUTLIERS) -> Float[Array, "*P {outliers}"]:
    """Returns which stored outliers are distinct keys, as 0 or 1; a page of one token stores its key twice.

    Counts 0, 1 and 4 give [0, 0], [1, 0] and [1, 1].
    """
    slots = jax.lax.broadcasted_iota(jnp.int32, (*count.shape, outliers), count.ndim)
    return (slots < count[..., None]).astype(jnp.float32)


def _num_inliers(count: Int[Array, "*P"]) -> Float[Array, "*P"]:
    return jnp.maximum(count.astype(jnp.float32) - OUTLIERS, 0.0)


def _mean(*parts: tuple[Float[Array, "B K P _"], Float[Array, "B K P _ H"]]) -> Float[Array, "B K P H"]:
    """Returns the weighted mean of vectors; 0 without weight. By products: XLA:CPU takes 30 times as long for weighted sums."""
    total = sum(EINSUM("bkps,bkpsh->bkph", weight, x) for weight, x in parts)
    return total / jnp.maximum(sum(weight.sum(-1) for weight, _ in parts), 1.0)[..., None]


def _split_outliers(
    keys: Float[Array, "B K P p H"], valid: Float[Array, "B K P p"], centre: Float[Array, "B K P H"]
) -> tuple[tuple[Float[Array, "B K P H"], ...], Float[Array, "B K P p"]]:
    """Returns the valid keys farthest from the centre, and a mask of the other valid keys."""
    distance = jnp.where(valid > 0, jnp.square(keys - centre[..., None, :]).sum(-1), -1.0)
    slots, indices = jax.lax.broadcasted_iota(jnp.int32, distance.shape, distance.ndim - 1), []
    for _ in range(OUTLIERS):
        largest = distance.max(-1, keepdims=True)
        farthest = (distance >= TIED * largest).argmax(-1, keepdims=True)
        farthest = jnp.where(largest >= 0, farthest, indices[0]) if indices else farthest
        distance = jnp.where(slots == farthest, -1.0, distance)
        indices.append(farthest)
    outliers = tuple(jnp.take_along_axis(keys, index[..., None], axis=-2)[..., 0, :] for index in indices)
    return outliers, (distance >= 0).astype(jnp.float32)


class Scores(NamedTuple):
    """Scores of pages for each query head, f32[B, K, G, P].

    Attributes:
        choice: estimated log-sum-exp, to choose pages by; -inf for an empty page.
        weight: the same with the second-order term clamped, to weigh pages by.
        lean: multiple of `Along.moved` by which softmax moves the page's mean key; 0 with the rule `mean`.
        wide: clamped variance of the scores of the page's keys; 0 with the rule `mean`.
    """

    choice: jax.Array
    weight: jax.Array
    lean: jax.Array | float
    wide: jax.Array | float


def score(
    q: Float[Array, "B K G H"], digests: Digests, lies: Along | None, rule: Score = "second-order", *, scoring: Scoring
) -> Scores:
    """Returns the estimated log-sum-exp of each page for each query head, in fp32.

    With scale s a page scores log(count) + s q.mean + s^2/2 q.C q, as if all its keys were inliers with covariance C, or s
    q.outlier where an outlier scores more. C comes from the page's width. `choice` has the second-order term in full, because
    keys that stand out make their page wide; in `weight` the term is at most 3 nats. The rule `mean` is log(count) + s q.(mean
    of all keys). A soft cap is applied to the products, and the second-order term is multiplied by the square of its slope.

    A page of 4 keys with s q.mean = 1, s^2 q.C q = 0.5 and s q.outlier = 3 scores max(1.39 + 1 + 0.25, 3) = 3.

    Args:
        lies: the covariance of pages applied to `q` (`key_scatter.along`), with the same `scoring`; None with the rule `mean`.
    """
    scaled = q.astype(jnp.float32) * scoring.scale
    count = digests.count[:, :, None, :].astype(jnp.float32)
    first, *outliers = (_products(scaled, x) for x in (digests.mean, *digests.outliers))
    if rule == "mean":
        first = sum(n * x for n, x in zip(_num_keys(digests.count), (first, *outliers), strict=True)) / jnp.maximum(count, 1.0)
        return Scores(*(scoring.capped(first) + jnp.log(count),) * 2, 0.0, 0.0)
    first, outlier = scoring.capped(first), scoring.capped(functools.reduce(jnp.maximum, outliers))
    slope = scoring.slope(first)
    # One product for variance and width: XLA:CPU is slow to sum a few numbers.
    rows = jnp.concatenate([lies.variance, jnp.ones_like(lies.variance[:, :, :1])], axis=2)
    variance, width = jnp.split(products(rows, digests.width), [q.shape[2]], axis=2)
    second = 0.5 * slope**2 * variance
    first += jnp.log(count)
    outlier = jnp.where(count > 0, outlier, -jnp.inf)
    bounded = jnp.minimum(second, TAIL_CLAMP)
    lean = jnp.sqrt(bounded / jnp.maximum(second, 1e-30))  # the mean moves by at most 2.4 standard deviations
    lean *= slope * width
    return Scores(jnp.maximum(first + second, outlier), jnp.maximum(first + bounded, outlier), lean, 2 * bounded)


def _products(q: Float[Array, "B K G H"], vectors: Vectors) -> Float[Array, "B K G P"]:
    q, data = jax.lax.platform_dependent(q, vectors.data, cpu=lambda *x: x, default=_keep_separate)
    dots = products(q, data.astype(jnp.float32))
    return dots if vectors.scale is None else dots * vectors.scale[:, :, None, :]


def _keep_separate(*x: jax.Array) -> tuple[jax.Array, ...]:
    """Keeps products with the same q apart: with one KV head XLA:GPU joins their vectors in fp32 and makes one product.

    Not for XLA:CPU, which would then copy gathered variances that are read twice, at the cost of a twentieth of a walk.
    """
    return jax.lax.optimization_barrier(x)


def weighted(weights: Float[Array, "B K G P"], digests: Digests) -> Float[Array, "B K G _"]:
    """Returns the weighted sums of the pages' mean values; of the means of all their keys where digests have no values."""
    if digests.value is not None:
        return _sums(weights, digests.value)
    per_key = weights / jnp.maximum(digests.count[:, :, None].astype(jnp.float32), 1.0)
    keys = (digests.mean, *digests.outliers)
    return sum(_sums(per_key * n, x) for n, x in zip(_num_keys(digests.count), keys, strict=True))


def _num_keys(count: Int[Array, "B K P"]) -> tuple[Float[Array, "B K 1 P"], ...]:
    """Returns how many keys of a page its mean represents, and how many each outlier: 2, 1 and 1 for a page of 4 keys."""
    return _num_inliers(count)[:, :, None], *jnp.moveaxis(distinct_outliers(count), -1, 0)[:, :, :, None]


def _sums(weights: Float[Array, "B K G P"], vectors: Vectors) -> Float[Array, "B K G _"]:
    weights = weights if vectors.scale is None else weights * vectors.scale[:, :, None, :]
    return jax.lax.platform_dependent(weights, vectors.data, cuda=_in_parts, rocm=_in_parts, default=_at_once)


def _at_once(weights: Float[Array, "B K G P"], x: Num[Array, "B K P H"]) -> Float[Array, "B K G H"]:
    return EINSUM("bkgp,bkph->bkgh", weights, x.astype(jnp.float32))


def _in_parts(weights: Float[Array, "B K G P"], x: Num[Array, "B K P H"]) -> Float[Array, "B K G H"]:
    """Sums in parts of 64 pages: a GPU sums a thousand pages in so few programs that most of it idles (bench/results/gpu.md).

    The number of pages opened by default is a multiple of 64, and so is a highest level of more than 512 nodes. Other numbers
    of pages are summed at once.
    """
    parts = x.shape[2] // PART if x.shape[2] % PART == 0 else 1
    weights, x = weights.reshape(*weights.shape[:3], parts, -1), x.reshape(*x.shape[:2], parts, -1, x.shape[3])
    return EINSUM("bkgsp,bksph->bksgh", weights, x.astype(jnp.float32)).sum(2)
