"""Matrices that are rounded as they are read: to what, and the `quantization_config` of a folder that holds such codes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from icejax.checkpoint.quantized.layouts import QuantizedMatrix
from icejax.ops.quantized.rounding import quantize


class Method(NamedTuple):
    """What a matrix is rounded to: symmetric codes, by the largest number that shares their scale.

    Attributes:
        dtype: of the codes.
        group: columns that share a scale with those of their row; None: all.
        format: compressed-tensors' name of a folder with such codes, and activations as they are.
    """

    dtype: str
    group: int | None
    format: str

    def config(self) -> dict[str, Any]:
        """Returns the `quantization_config` of such a folder, in which routers, embedding and head are as they were."""
        about = jnp.finfo(self.dtype) if jnp.issubdtype(self.dtype, jnp.floating) else jnp.iinfo(self.dtype)
        weights = dict(
            num_bits=about.bits,
            type="float" if self.format == "float-quantized" else "int",
            strategy="channel" if self.group is None else "group",
            group_size=self.group,
            symmetric=True,
            dynamic=False,
        )
        return dict(
            quant_method="compressed-tensors",
            format=self.format,
            quantization_status="compressed",
            config_groups={"group_0": dict(targets=["Linear"], weights=weights, input_activations=None)},
            ignore=["lm_head", "re:.*gate$"],
        )

    def rounded(self, matrix: np.ndarray) -> QuantizedMatrix:
        """Returns the codes of a matrix; scales are bf16 numbers, as they stand in a folder."""
        # Of a copy, or on a CPU JAX would hold the matrix longer than is needed.
        codes, scale = _rounded(jnp.array(matrix), dtype=self.dtype, group=self.group)
        return QuantizedMatrix(np.asarray(codes), np.asarray(scale, np.float32), None, 4 if self.dtype == "int4" else 8)


METHODS = {
    "int8": Method("int8", None, "pack-quantized"),
    "fp8": Method("float8_e4m3fn", None, "float-quantized"),
    "int4": Method("int4", 128, "pack-quantized"),
}


@functools.partial(jax.jit, static_argnames=("dtype", "group"))
def _rounded(matrix: jax.Array, *, dtype: str, group: int | None) -> tuple[jax.Array, jax.Array]:
    groups = matrix.reshape(len(matrix), -1, group or matrix.shape[1])
    codes, scale = quantize(groups, dtype, axis=-1, scale_dtype="bfloat16")
    return codes.reshape(matrix.shape).astype("int8" if dtype == "int4" else dtype), scale[..., 0]
