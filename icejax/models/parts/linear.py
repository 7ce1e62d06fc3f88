"""Linear projections and RMS norms over [B, T, features], with weights as Hugging Face stores them; all layers use them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from icejax.config import ModelConfig
from icejax.ops.quantized.products import product
from icejax.runtime.mesh import Mesh, hidden_total, part, size, total


class Linear(nnx.Module):
    """y = x W^T + b, with W [O, I] dense or quantized (`ops.quantized.products.Grouped`).

    Attributes:
        summed_over: the mesh whose devices each have a part of the input channels; None: a device has all. The sum is
            `hidden_total`.
    """

    def __init__(self, features_in: int, features_out: int, *, bias: bool, dtype: str) -> None:
        self.weight = nnx.Param(jnp.zeros((features_out, features_in), dtype))
        if bias:
            self.bias = nnx.Param(jnp.zeros((features_out,), dtype))
        self.has_bias = bias
        self.summed_over: Mesh | None = None

    def __call__(self, x: Float[Array, "B T I"]) -> Float[Array, "B t O"]:
        y = hidden_total(self.summed_over, product(x, self.weight.get_value())).astype(x.dtype)
        return y + self.bias[...][None, None, :] if self.has_bias else y


def normalised(x: jax.Array, eps: float, summed_over: Mesh | None = None) -> jax.Array:
    """Returns the vectors of the last axis divided by their root mean square, in fp32; `summed_over` as in `RMSNorm`."""
    wide = x.astype(jnp.float32)
    squares = total(summed_over, jnp.square(wide).mean(-1, keepdims=True)) / size(summed_over)
    return wide * lax.rsqrt(squares + eps)


class RMSNorm(nnx.Module):
    """Root-mean-square norm (arXiv 1910.07467) of the last axis, in fp32; `kind` as `ModelConfig.norm`.

    Attributes:
        summed_over: the mesh whose devices each have a part of the vector, and the whole weight; None: a device has all.
    """

    def __init__(self, features: int, *, eps: float, dtype: str, kind: str = "rounded") -> None:
        self.weight = nnx.Param(jnp.zeros((features,), dtype))
        self.eps, self.kind = eps, kind
        self.summed_over: Mesh | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        normal = normalised(x, self.eps, self.summed_over)
        weight = part(self.summed_over, self.weight[...], x.shape[-1]).reshape((1,) * (x.ndim - 1) + (-1,))
        if self.kind == "rounded":
            return normal.astype(x.dtype) * weight
        weight = weight.astype(jnp.float32)
        return (normal * (1.0 + weight if self.kind == "offset" else weight)).astype(x.dtype)


def norm_of(config: ModelConfig, features: int, *, dtype: str) -> RMSNorm:
    """Returns an RMSNorm over `features` channels with the epsilon and the kind of a model."""
    return RMSNorm(features, eps=config.rms_norm_eps, kind=config.norm, dtype=dtype)
