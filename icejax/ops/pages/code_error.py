"""The error that codes leave in attention, estimated from their steps.

A code rounds a channel to the nearest of numbers that are one step apart. Its error is assumed uniform from half a step below
to half above, so that its variance is step^2 / 12, and as independent of the other channels' and tokens'. Offset and step are
rounded too, to multiples of s and t: a channel's least and largest token of n may then be off by what these ends move,

    step^2 / 12 + (2 s^2 + (2^bits - 1)^2 t^2) / 24 n

where the second part counts with 8 bits alone. Of random pages of 16 tokens the true variance is 0.76 to 0.82 of that with 2 to
4 bits, because the ends of the range are hardly rounded and the line is fitted to the tokens, and 0.93 to 0.97 with 8. With the
weights w of tokens, their values v and the output o = sum w v, a score that is off by e and a value that is off by d move the
output, to first order, by

    sum w e (v - o) + sum w d

So the expected square of the error is sum w^2 (var e |v - o|^2 + var d). The variance of e is scale^2 sum_c q_c^2 times that of
channel c of the key, and that of d the sum over the channels of the value. A soft cap makes scores' errors smaller, which is
left out.

`code_attention` sums it over pages in a decode step, and a policy calls `relative_error` once it knows the output. R is B K.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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

    def with_values(self, moved: Float[Array, "R G S"], values: Float[Array, "R S Hv"]) -> CodeNoise:
        """Returns the sum with the decoded values of some tokens, whose w^2 var e are `moved`."""
        squares = jnp.square(values.astype(jnp.float32)).sum(-1)[:, None]
        moving = self.moving + EINSUM("rgs,rsh->rgh", moved.astype(values.dtype), values)
        return self._replace(fixed=self.fixed + (moved * squares).sum(-1), moving=moving)


def noise_without_values(
    q: Float[Array, "R G H"],
    keys: KeyCodes,
    values: KeyCodes,
    count: Int[Array, "R P"],
    weights: Float[Array, "R G S"],
    rest: Attended,
    *,
    scoring: Scoring,
    bits: int,
) -> tuple[CodeNoise, Float[Array, "R G S"]]:
    """Returns the sum without any value, and w^2 var e of every token, for `CodeNoise.with_values`.

    Args:
        keys, values: codes of all pages, arrays [R, P, ...]; the same where keys hold the values.
        count: tokens of every page.
        weights: of all tokens, page after page; 0 for those attended exactly.
        rest: the attention in whose sum these are the weights, f32[R, G, Hv] and f32[R, G].
    """
    key_noise, value_noise = (_variances(x, count, bits) for x in (keys, values))
    of_scores = EINSUM("rgh,rph->rgp", jnp.square(q.astype(jnp.float32) * scoring.scale), key_noise)
    of_values = value_noise[..., : rest.out.shape[-1]].sum(-1)[:, None]
    squares, slots = jnp.square(weights), weights.shape[-1] // count.shape[1]
    moved, still = (squares * jnp.repeat(x, slots, axis=-1) for x in (of_scores, of_values))
    return CodeNoise(still.sum(-1), jnp.zeros_like(rest.out), moved.sum(-1), rest.lse), moved


def relative_error(noise: CodeNoise, attended: Attended) -> Float[Array, "*R G"]:
    """Returns the root of the expected square of the error, relative to the output f32[*R, G, Hv]."""
    size = jnp.square(attended.out).sum(-1)
    square = noise.fixed - 2 * (noise.moving * attended.out).sum(-1) + noise.share * size
    share = jnp.exp(noise.lse - attended.lse)  # of the tokens in the sum, codes among them
    return share * jnp.sqrt(jnp.maximum(square, 0) / jnp.maximum(size, 1e-30))


def _variances(codes: KeyCodes, count: Int[Array, "R P"], bits: int) -> Float[Array, "R P H"]:
    s, t = (jnp.square(x.scale) if isinstance(x, Vectors) else jnp.zeros(()) for x in (codes.low, codes.step))
    step = codes.step.read() if isinstance(codes.step, Vectors) else codes.step
    ends = (2 * s + (2**bits - 1) ** 2 * t) / (24 * jnp.maximum(count, 1).astype(jnp.float32))
    return jnp.square(step.astype(jnp.float32)) / 12 + ends[..., None]
