"""Methods that round matrices to codes as they are read, and the `quantization_config` of a folder with these codes.

`icejax.checkpoint.quantized.formats` and `icejax.checkpoint.tensor_mapping` call it. A matrix [O, I] becomes codes [O, I] and
scales f32[O, G], one per group of I / G columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from icejax.checkpoint.quantized.layouts import QuantizedMatrix
from icejax.ops.quantized.rounding import quantize


class Method(NamedTuple):
    """A way to round a matrix to symmetric codes: the largest number of a group becomes the largest code.

    Attributes:
        dtype: dtype of the codes.
        group: columns of a row that share a scale, a power of two; None: all columns.
        format: compressed-tensors' name for a folder with these codes.
    """

    dtype: str
    group: int | None
    format: str

    def group_in(self, columns: int) -> int | None:
        """Returns the columns per scale in rows of `columns`: `group`, or its largest divisor that divides `columns`.

        Example: groups of 128 have 64 columns in a row of 576.
        """
        return None if self.group is None else math.gcd(self.group, columns)

    def config(self, columns: Mapping[str, int] = MappingProxyType({})) -> dict[str, Any]:
        """Returns the `quantization_config` of a folder with these codes; routers, embedding and head are not quantised.

        Args:
            columns: number of columns of each rounded matrix, by the name of its module; modules with smaller groups than
                `group` are named in the config.
        """
        info = jnp.finfo(self.dtype) if jnp.issubdtype(self.dtype, jnp.floating) else jnp.iinfo(self.dtype)
        weights = dict(
            num_bits=info.bits,
            type="float" if self.format == "float-quantized" else "int",
            strategy="channel" if self.group is None else "group",
            symmetric=True,
            dynamic=False,
        )
        smaller = sorted({self.group_in(count) for count in columns.values()} - {self.group}) if self.group else []
        targets = [(size, [name for name, count in columns.items() if self.group_in(count) == size]) for size in smaller]
        groups = [
            dict(targets=names, weights=weights | dict(group_size=size), input_activations=None)
            for size, names in (*targets, (self.group, ["Linear"]))
        ]
        return dict(
            quant_method="compressed-tensors",
            format=self.format,
            quantization_status="compressed",
            config_groups={f"group_{i}": group for i, group in enumerate(groups)},
            ignore=["lm_head", "re:.*gate$"],
        )

    def rounded(self, matrix: np.ndarray) -> QuantizedMatrix:
        """Returns the codes of a matrix [O, I]; scales are bfloat16 numbers, as a folder stores them."""
        # A copy: on a CPU JAX would hold the matrix itself longer than needed.
        codes, scale = _rounded(jnp.array(matrix), dtype=self.dtype, group=self.group_in(matrix.shape[1]))
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
