"""Digests: what the device keeps of a page, and the score a query gives a page by its digest alone."""

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

TAIL_CLAMP = 3.0  # nats; a wide page's second-order term overstates its weight without bound
TIED = 0.9999  # two keys are equally far from their mean but for rounding: the first is the outlier
PART = 64  # pages whose values a GPU adds up at a time
OUTLIERS = 2  # of a page; with one, sharp heads of one model of five had twice the error
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
        outliers: of a page the two keys farthest from the mean of all; of a node the two outliers of pages that are.
        mean: mean of the other keys; of two or fewer of all.
        width: mean squared distance of these from their mean, band by band (`icejax.ops.pages.key_scatter`).
        value: mean value of all; None where values are channels of the keys, so that their means are too.
    """

    count: jax.Array  # i32[B, K, P]
    outliers: tuple[Vectors, ...]
    mean: Vectors
    width: jax.Array  # f32[B, K, P, n]
    value: Vectors | None


def empty(shape: tuple[int, ...], size: int, value_size: int | None, dtype: str) -> Digests:
    """Returns digests of nothing, of keys of `size` channels and values of `value_size`; None: without values."""
    nothing = Vectors.store(jnp.zeros((*shape, size)), dtype)
    value = None if value_size is None else Vectors.store(jnp.zeros((*shape, value_size)), dtype)
    width = jnp.zeros((*shape, bands(size)))
    return Digests(jnp.zeros(shape, jnp.int32), (nothing,) * OUTLIERS, nothing, width, value)


def put(pages: Digests, new: Digests, first: Int[Array, ""]) -> Digests:
    """Returns the digests of all pages with new ones from page `first` on."""
    return jax.tree.map(lambda old, x: jax.lax.dynamic_update_slice_in_dim(old, x, first, axis=2), pages, new)


def digest(
    k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"], dtype: str | None = None
) -> Digests:
    """Returns the digests of pages, in the dtype of `k` or another; slots outside `mask` are not read."""
    keys, values = jax.tree.map(lambda x: Vectors(jnp.where(mask[..., None], x, 0).astype(jnp.float32), None), (k, v))
    none = jnp.zeros((*k.shape[:-1], bands(k.shape[-1])))
    tokens = Digests(mask.astype(jnp.int32), (keys,), keys, none, values)
    return merge(tokens, dtype or k.dtype)


def merge(parts: Digests, dtype: str | jnp.dtype | None = None) -> Digests:
    """Returns the digests of runs of pages from those of their pages, an axis more: [B, K, P, fan-out] to [B, K, P].

    In the dtype of the parts or another, exact but for rounding to it: widths add by the parallel-axis rule, to which
    every outlier but those that stay is a key like the others.
    """
    outliers, mean = jnp.stack([x.read() for x in parts.outliers], axis=-2), parts.mean.read()
    apart, inner = apart_of(parts.count, len(parts.outliers)), _others_of(parts.count)
    outliers, apart = (x.reshape(*x.shape[:3], -1, *x.shape[5:]) for x in (outliers, apart))
    count = parts.count.sum(-1, dtype=jnp.int32)
    kept, rest = _outlying(outliers, apart, _mean((inner, mean), (apart, outliers)))
    others = jnp.where((count <= OUTLIERS)[..., None], apart, rest)
    centre = _mean((inner, mean), (others, outliers))
    wide, far = (widths(jnp.square(x - centre[..., None, :])) for x in (mean, outliers))
    inner, others = (x / jnp.maximum((inner.sum(-1) + others.sum(-1))[..., None], 1.0) for x in (inner, others))
    width = EINSUM("bkps,bkpsn->bkpn", inner, parts.width + wide) + EINSUM("bkps,bkpsn->bkpn", others, far)
    value = None if parts.value is None else _mean((parts.count.astype(jnp.float32), parts.value.read()))
    kept, centre, value = jax.tree.map(lambda x: Vectors.store(x, dtype or parts.mean.data.dtype), (kept, centre, value))
    return Digests(count, kept, centre, width, value)


def apart_of(count: Int[Array, "*P"], outliers: int = OUTLIERS) -> Float[Array, "*P {outliers}"]:
    """Returns which outliers of so many tokens are keys of their own; of fewer tokens the last ones are the first again."""
    slots = jax.lax.broadcasted_iota(jnp.int32, (*count.shape, outliers), count.ndim)
    return (slots < count[..., None]).astype(jnp.float32)


def _others_of(count: Int[Array, "*P"]) -> Float[Array, "*P"]:
    return jnp.maximum(count.astype(jnp.float32) - OUTLIERS, 0.0)


def _mean(*parts: tuple[Float[Array, "B K P _"], Float[Array, "B K P _ H"]]) -> Float[Array, "B K P H"]:
    """Returns the mean of weighted vectors; 0 of none. By products: XLA:CPU takes 30 times as long for weighted sums."""
    total = sum(EINSUM("bkps,bkpsh->bkph", weight, x) for weight, x in parts)
    return total / jnp.maximum(sum(weight.sum(-1) for weight, _ in parts), 1.0)[..., None]


def _outlying(
    keys: Float[Array, "B K P p H"], there: Float[Array, "B K P p"], centre: Float[Array, "B K P H"]
) -> tuple[tuple[Float[Array, "B K P H"], ...], Float[Array, "B K P p"]]:
    """Returns of the keys that are there those farthest from their centre, and which are the others."""
    distance = jnp.where(there > 0, jnp.square(keys - centre[..., None, :]).sum(-1), -1.0)
    slots, found = jax.lax.broadcasted_iota(jnp.int32, distance.shape, distance.ndim - 1), []
    for _ in range(OUTLIERS):
        most = distance.max(-1, keepdims=True)
        farthest = (distance >= TIED * most).argmax(-1, keepdims=True)
        farthest = jnp.where(most >= 0, farthest, found[0]) if found else farthest
        distance = jnp.where(slots == farthest, -1.0, distance)
        found.append(farthest)
    kept = tuple(jnp.take_along_axis(keys, at[..., None], axis=-2)[..., 0, :] for at in found)
    return kept, (distance >= 0).astype(jnp.float32)


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

    With s for the scale: log(count) + s q.mean + s^2/2 q.C q, as if all keys were like those that do not stand out, but not
    less than s q.outlier, which one key has alone; C is the covariance that keys of this width have. By the rule `mean`
    log(count) + s q.(mean of all). Of a soft cap the products are capped, and the term of the width is multiplied by the
    square of the cap's slope there. That is what pages are chosen by, because keys that stand out make their page wide; to
    weigh pages by, the term of the width is at most 3 nats.

    Args:
        lies: what pages are along `q`, of the same `scoring`; None: by the rule `mean`, which asks for nothing.
    """
    scaled = q.astype(jnp.float32) * scoring.scale
    count = digests.count[:, :, None, :].astype(jnp.float32)
    first, *outliers = (_products(scaled, x) for x in (digests.mean, *digests.outliers))
    if rule == "mean":
        first = sum(n * x for n, x in zip(_shares(digests.count), (first, *outliers), strict=True)) / jnp.maximum(count, 1.0)
        return Scores(*(scoring.capped(first) + jnp.log(count),) * 2, 0.0, 0.0)
    first, outlier = scoring.capped(first), scoring.capped(functools.reduce(jnp.maximum, outliers))
    slope = scoring.slope(first)
    # One product for both: XLA:CPU is slow to add up a few numbers.
    rows = jnp.concatenate([lies.variance, jnp.ones_like(lies.variance[:, :, :1])], axis=2)
    variance, width = jnp.split(products(rows, digests.width), [q.shape[2]], axis=2)
    second = 0.5 * slope**2 * variance
    first += jnp.log(count)
    outlier = jnp.where(count > 0, outlier, -jnp.inf)
    bounded = jnp.minimum(second, TAIL_CLAMP)
    lean = jnp.sqrt(bounded / jnp.maximum(second, 1e-30))  # at most 2.4 deviations along the query
    lean *= slope * width
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
    each = weights / jnp.maximum(digests.count[:, :, None].astype(jnp.float32), 1.0)
    keys = (digests.mean, *digests.outliers)
    return sum(_sums(each * n, x) for n, x in zip(_shares(digests.count), keys, strict=True))


def _shares(count: Int[Array, "B K P"]) -> tuple[Float[Array, "B K 1 P"], ...]:
    """Returns for how many keys of a page the mean stands, and each outlier."""
    return _others_of(count)[:, :, None], *jnp.moveaxis(apart_of(count), -1, 0)[:, :, :, None]


def _sums(weights: Float[Array, "B K G P"], vectors: Vectors) -> Float[Array, "B K G _"]:
    weights = weights if vectors.scale is None else weights * vectors.scale[:, :, None, :]
    return jax.lax.platform_dependent(weights, vectors.data, cuda=_in_parts, rocm=_in_parts, default=_at_once)


def _at_once(weights: Float[Array, "B K G P"], x: Num[Array, "B K P H"]) -> Float[Array, "B K G H"]:
    return EINSUM("bkgp,bkph->bkgh", weights, x.astype(jnp.float32))


def _in_parts(weights: Float[Array, "B K G P"], x: Num[Array, "B K P H"]) -> Float[Array, "B K G H"]:
    """Or a GPU adds up a thousand pages in so few programs that most of it has nothing to do (bench/results/gpu.md).

    What is opened by default, and a highest level of more than 512 nodes, are whole parts; what is not is added up at once.
    """
    parts = x.shape[2] // PART if x.shape[2] % PART == 0 else 1
    weights, x = weights.reshape(*weights.shape[:3], parts, -1), x.reshape(*x.shape[:2], parts, -1, x.shape[3])
    return EINSUM("bkgsp,bksph->bksgh", weights, x.astype(jnp.float32)).sum(2)
