"""Matrices of e2m1, two numbers of four bits in a byte, the lower first (OCP Microscaling Formats 1.0, NVIDIA's NVFP4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import ml_dtypes
import numpy as np

from icejax.checkpoint.quantized.layouts import Layout, Part, QuantizedMatrix, Shape, nibbles

FLOAT4, EXPONENTS = np.dtype(ml_dtypes.float4_e2m1fn), np.dtype(ml_dtypes.float8_e8m0fnu)
TWICE = (2 * np.arange(16, dtype=np.uint8).view(FLOAT4).astype(np.float32)).astype(np.int8)  # a number of e2m1, by its bits


def doubled(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Returns a matrix of e2m1 as int8, its numbers doubled, as `ops.quantized.products.Grouped` needs it; another as it is."""
    if matrix.codes.dtype != FLOAT4:
        return matrix
    return matrix._replace(codes=TWICE[matrix.codes.view(np.uint8)], scale=matrix.scale * np.float32(0.5))


@dataclass(frozen=True, kw_only=True)
class Float4(Layout):
    """compressed-tensors' nvfp4- and mxfp4-pack-quantized: scales of e4m3 over one of the whole matrix, or powers of two.

    Attributes:
        powers: whether scales are powers of two.
    """

    powers: bool

    def parts(self, shape: Shape) -> dict[str, Part]:
        scales = {"weight_scale": Part(("U8", "F8_E8M0") if self.powers else ("F8_E4M3",), (self.grid(shape),))}
        whole = {name: Part(("F32",), ((1,), ()), name[0] == "w") for name in ("weight_global_scale", "input_global_scale")}
        return {"weight_packed": Part(("U8",), ((shape[0], -(-shape[1] // 2)),))} | scales | ({} if self.powers else whole)

    def codes(self, shape: Shape, parts: Mapping[str, np.ndarray]) -> QuantizedMatrix:
        scale = parts["weight_scale"]
        if self.powers:
            scale = self.scale(scale.view(EXPONENTS), shape)
        else:
            scale = self.scale(scale, shape) / parts["weight_global_scale"].reshape(())
        return QuantizedMatrix(_codes(parts["weight_packed"])[:, : shape[1]], scale, None)


@dataclass(frozen=True, kw_only=True)
class Mxfp4(Layout):
    """gpt-oss's form of a stack [E, I, O] of turned matrices, as codes [E, O, I]: blocks of 32, exponents of their scales."""

    block: tuple[int, int] = (1, 32)
    axes: ClassVar[int] = 3

    def prefix(self, key: str) -> str:
        return f"{key}_"

    def parts(self, shape: Shape) -> dict[str, Part]:
        grid = (shape[0], *self.grid(shape[:0:-1]))
        return {"blocks": Part(("U8",), ((*grid, 16),)), "scales": Part(("U8",), (grid,))}

    def codes(self, shape: Shape, parts: Mapping[str, np.ndarray]) -> QuantizedMatrix:
        shape = shape[::-1]
        codes = _codes(parts["blocks"].reshape(shape[0], -1))[:, : shape[1]]
        return QuantizedMatrix(codes, self.scale(parts["scales"].view(EXPONENTS), shape), None)


def _codes(packed: np.ndarray) -> np.ndarray:
    """Returns the numbers of bytes u8[R, C]: float4_e2m1fn[R, 2 C]."""
    return nibbles(packed).view(FLOAT4)
