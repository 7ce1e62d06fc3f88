"""Digests: what the device keeps of a page, and the score a query gives a page by its digest alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.ops.attention import EINSUM, Scoring, products
from icejax.ops.quantize import dequantize, quantize
from icejax.ops.scatter import Along

TAIL_CLAMP = 3.0  # nats; a wide page's second-order term overstates its weight without bound
TIED = 0.9999  # two keys are equally far from their mean but for rounding: the first is the outlier
NARROW = ("int8", "float8_e4m3fn")  # dtypes of digests besides the model's own
Score = Literal["second-order", "mean"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Vectors:
    """One vector per page: as they are, or in a narrow dtype with the scale of each.

    Attributes:
        scale: None for vectors as they are.
    """

    data: jax.Array  # dtype[..., H]
    scale: jax.Array | None  # f32[...]

    @staticmethod
    def store(x: Float[Array, "... H"], dtype: str | jnp.dtype) -> Vectors:
        """Rounds to `dtype`; what fp16 could not hold is kept finite."""
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

    Attributes:
        count: tokens, 0 for an empty one.
        outlier: of a page the key farthest from the mean of all; of a node the outlier of a page that is.
        mean: mean of the other keys; of a single one itself.
        width: mean squared distance of the other keys from their mean.
        value: mean value of all; None where values are channels of the keys, so that their means are too.
    """

    count: jax.Array  # i32[B, K, P]
    outlier: Vectors
    mean: Vectors
    width: jax.Array  # f32[B, K, P]
    value: Vectors | None


def empty(shape: tuple[int, ...], size: int, value_size: int | None, dtype: str) -> Digests:
    """Returns digests of nothing, of keys of `size` channels and values of `value_size`; None: without values."""
    nothing = Vectors.store(jnp.zeros((*shape, size)), dtype)
    value = None if value_size is None else Vectors.store(jnp.zeros((*shape, value_size)), dtype)
    return Digests(jnp.zeros(shape, jnp.int32), nothing, nothing, jnp.zeros(shape), value)


def put(pages: Digests, new: Digests, first: Int[Array, ""]) -> Digests:
    """Returns the digests of all pages with new ones from page `first` on."""
    return jax.tree.map(lambda old, x: jax.lax.dynamic_update_slice_in_dim(old, x, first, axis=2), pages, new)


def digest(
    k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"], dtype: str | None = None
) -> Digests:
    """Returns the digests of pages, in the dtype of `k` or another; slots outside `mask` are not read."""
    keys, values = jax.tree.map(lambda x: Vectors(jnp.where(mask[..., None], x, 0).astype(jnp.float32), None), (k, v))
    tokens = Digests(mask.astype(jnp.int32), keys, keys, jnp.zeros(k.shape[:-1]), values)
    return merge(tokens, dtype or k.dtype)


def merge(parts: Digests, dtype: str | jnp.dtype | None = None) -> Digests:
    """Returns the digests of runs of pages from those of their pages, an axis more: [B, K, P, fan-out] to [B, K, P].

    In the dtype of the parts or another, exact but for rounding to it: widths add by the parallel-axis rule, to which
    every outlier but the one that stays is a key like the others.
    """
    count = parts.count.astype(jnp.float32)
    outliers, mean = parts.outlier.read(), parts.mean.read()
    there, inner = jnp.minimum(count, 1.0), jnp.maximum(count - 1.0, 0.0)
    outlier, others = _outlying(outliers, count, _mean((inner, mean), (there, outliers)))
    centre = _mean((inner, mean), (others, outliers))
    wide, far = (jnp.minimum(jnp.square(x - centre[..., None, :]).sum(-1), 3e38) for x in (mean, outliers))
    value = None if parts.value is None else _mean((count, parts.value.read()))
    width = (inner * (parts.width + wide) + others * far).sum(-1) / jnp.maximum((inner + others).sum(-1), 1.0)
    outlier, centre, value = jax.tree.map(lambda x: Vectors.store(x, dtype or parts.mean.data.dtype), (outlier, centre, value))
    return Digests(parts.count.sum(-1, dtype=jnp.int32), outlier, centre, width, value)


def _mean(*parts: tuple[Float[Array, "B K P p"], Float[Array, "B K P p H"]]) -> Float[Array, "B K P H"]:
    """Returns the mean of weighted vectors; 0 of none. By products: XLA:CPU takes 30 times as long for weighted sums."""
    total = sum(EINSUM("bkps,bkpsh->bkph", weight, x) for weight, x in parts)
    return total / jnp.maximum(sum(weight.sum(-1) for weight, _ in parts), 1.0)[..., None]


def _outlying(
    keys: Float[Array, "B K P p H"], count: Float[Array, "B K P p"], centre: Float[Array, "B K P H"]
) -> tuple[Float[Array, "B K P H"], Float[Array, "B K P p"]]:
    """Returns of `count` tokens' keys the one farthest from their centre, and which are the others: itself, if it is alone."""
    distance = jnp.where(count > 0, jnp.square(keys - centre[..., None, :]).sum(-1), -1.0)
    farthest = (distance >= TIED * distance.max(-1, keepdims=True)).argmax(-1, keepdims=True)
    slots = jax.lax.broadcasted_iota(jnp.int32, distance.shape, distance.ndim - 1)
    alone = count.sum(-1, keepdims=True) <= 1
    others = (count > 0) & (alone | (slots != farthest))
    return jnp.take_along_axis(keys, farthest[..., None], axis=-2)[..., 0, :], others.astype(jnp.float32)


class Scores(NamedTuple):
    """What a query's heads make of pages, f32[B, K, G, P] each.

    Attributes:
        choice: estimated log-sum-exp to choose pages by; -inf of an empty one.
        weight: the same to weigh them by, a wide page's bounded.
        lean: how much of `Along.moved` softmax moves the mean key of a page; by the rule `mean` nothing.
        wide: variance of the scores of a page's keys, bounded; by the rule `mean` nothing.
    """

    choice: jax.Array
    weight: jax.Array
    lean: jax.Array | float
    wide: jax.Array | float


def score(
    q: Float[Array, "B K G H"], digests: Digests, lies: Along | None, rule: Score = "second-order", *, scoring: Scoring
) -> Scores:
    """Returns the estimated log-sum-exps of every page for every query head, in fp32.

    With s for the scale: log(count) + s q.mean + s^2/2 q.C q width, as if all keys were like those that do not stand out,
    but not less than s q.outlier, which one key has alone; C is the covariance that keys of width 1 have. By the rule `mean`
    log(count) + s q.(mean of all). Of a soft cap the products are capped, and the term of the width is multiplied by the
    square of the cap's slope there. That is what pages are chosen by, because keys that stand out make their page wide; to
    weigh pages by, the term of the width is at most 3 nats.

    Args:
        lies: what pages are along `q`, of the same `scoring`; None: by the rule `mean`, which asks for nothing.
    """
    scaled = q.astype(jnp.float32) * scoring.scale
    count = digests.count[:, :, None, :].astype(jnp.float32)
    first, outlier = _products(scaled, digests.mean), _products(scaled, digests.outlier)
    if rule == "mean":
        first += (outlier - first) / jnp.maximum(count, 1.0)
        return Scores(*(scoring.capped(first) + jnp.log(count),) * 2, 0.0, 0.0)
    first, outlier = scoring.capped(first), scoring.capped(outlier)
    slope = scoring.slope(first)
    second = 0.5 * slope**2 * lies.variance[..., None] * digests.width[:, :, None]
    first += jnp.log(count)
    outlier = jnp.where(count > 0, outlier, -jnp.inf)
    bounded = jnp.minimum(second, TAIL_CLAMP)
    lean = jnp.sqrt(bounded / jnp.maximum(second, 1e-30))  # at most 2.4 deviations along the query
    lean *= slope * digests.width[:, :, None]
    return Scores(jnp.maximum(first + second, outlier), jnp.maximum(first + bounded, outlier), lean, 2 * bounded)


def _products(q: Float[Array, "B K G H"], vectors: Vectors) -> Float[Array, "B K G P"]:
    q, data = jax.lax.platform_dependent(q, vectors.data, cpu=lambda *x: x, default=_singly)
    dots = products(q, data.astype(jnp.float32))
    return dots if vectors.scale is None else dots * vectors.scale[:, :, None, :]


def _singly(*x: jax.Array) -> tuple[jax.Array, ...]:
    """Or XLA:GPU makes one product of several with the same q, and joins their vectors in fp32, if there is one KV head.

    XLA:CPU would copy gathered variances for it, which are read twice: a twentieth of a walk.
    """
    return jax.lax.optimization_barrier(x)


def weighted(weights: Float[Array, "B K G P"], digests: Digests) -> Float[Array, "B K G _"]:
    """Returns sums of the mean values of pages; where digests have none, of the means of all their keys."""
    if digests.value is not None:
        return _sums(weights, digests.value)
    count = digests.count[:, :, None].astype(jnp.float32)
    each = weights / jnp.maximum(count, 1.0)
    return _sums(each * jnp.maximum(count - 1.0, 0.0), digests.mean) + _sums(each, digests.outlier)


def _sums(weights: Float[Array, "B K G P"], vectors: Vectors) -> Float[Array, "B K G _"]:
    weights = weights if vectors.scale is None else weights * vectors.scale[:, :, None, :]
    return EINSUM("bkgp,bkph->bkgh", weights, vectors.data.astype(jnp.float32))
