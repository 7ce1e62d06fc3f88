"""The error that codes leave in attention, estimated from their steps alone: no token is decoded for it.

A code rounds a channel to the nearest of numbers that are one step apart. Its error is taken as even between half a step below
and above, so that its variance is step^2 / 12, and as independent of the other channels' and tokens'. With the weights w of
tokens, their values v and the output o = sum w v, a score that is off by e and a value that is off by d move the output by

    sum w e (v - o) + sum w d

to first order. Over the tokens of a page w^2 is summed exactly. The variance of e is scale^2 sum_c q_c^2 step_c^2 / 12 with the
steps of the page's keys; a soft cap makes it smaller, which is left out. The variance of d is sum_c step_c^2 / 12 with those of
its values. A value v is taken as even over its channels' ranges: |v - o|^2 is |m - o|^2 + sum_c range_c^2 / 12, with the middle
m of the ranges. So the expected square of the error is a sum over pages of numbers that the device has anyway.

`code_attention` calls `code_noise` in a decode step, and a policy `relative_error` once it knows the output. R is B K.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.ops.attention.dense import EINSUM, Attended, Scoring
from icejax.ops.pages.digests import Vectors
from icejax.ops.pages.key_codes import KeyCodes


class CodeNoise(NamedTuple):
    """The expected square of the error of coded tokens, as a function of the output o: fixed - 2 moving . o + share |o|^2.

    The weights are those of the tokens in their own sum, `lse`.

    Attributes:
        fixed: f32[R, G].
        moving: f32[R, G, Hv].
        share: f32[R, G].
        lse: log-sum-exp by which the weights are normalised, f32[R, G].
    """

    fixed: jax.Array
    moving: jax.Array
    share: jax.Array
    lse: jax.Array


def code_noise(
    q: Float[Array, "R G H"],
    keys: KeyCodes,
    values: KeyCodes | None,
    weights: Float[Array, "R G S"],
    lse: Float[Array, "R G"],
    *,
    scoring: Scoring,
    bits: int,
    value_size: int,
) -> CodeNoise:
    """Returns the expected square of the error of pages whose tokens have `weights`, 0 for those attended exactly.

    Args:
        keys, values: the codes of the pages, arrays [R, P, ...]; no values: the first channels of keys are the values.
        lse: log-sum-exp by which the weights are normalised.
    """
    key_step = _read(keys.step)
    low, step = (_read(x)[..., :value_size] for x in ((values or keys).low, (values or keys).step))
    squares = jnp.square(weights).reshape(*weights.shape[:2], low.shape[1], -1).sum(-1)  # [R, G, P]
    of_score = EINSUM("rgh,rph->rgp", jnp.square(q.astype(jnp.float32) * scoring.scale), jnp.square(key_step) / 12)
    middle, widths = low + step * ((2**bits - 1) / 2), jnp.square(step).sum(-1) / 12
    apart = jnp.square(middle).sum(-1) + widths * (2**bits - 1) ** 2
    moved = squares * of_score
    fixed = EINSUM("rgp,rp->rg", moved, apart) + EINSUM("rgp,rp->rg", squares, widths)
    return CodeNoise(fixed, EINSUM("rgp,rph->rgh", moved, middle), moved.sum(-1), lse)


def relative_error(noise: CodeNoise, attended: Attended) -> Float[Array, "*R G"]:
    """Returns the root of the expected square of the error, relative to the output f32[*R, G, Hv]."""
    size = jnp.square(attended.out).sum(-1)
    square = noise.fixed - 2 * (noise.moving * attended.out).sum(-1) + noise.share * size
    share = jnp.exp(noise.lse - attended.lse)  # of the tokens in the sum, codes among them
    return share * jnp.sqrt(jnp.maximum(square, 0) / jnp.maximum(size, 1e-30))


def _read(x: jax.Array | Vectors) -> Float[Array, "R P _"]:
    return (x.read() if isinstance(x, Vectors) else x).astype(jnp.float32)
