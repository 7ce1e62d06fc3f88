"""Matrices of e2m1 numbers, two 4-bit codes per byte, the lower nibble first (OCP Microscaling Formats 1.0, NVIDIA's NVFP4).

`icejax.checkpoint.quantized.formats` chooses these layouts by config.json. Bytes u8[R, C] hold the codes float4_e2m1fn[R, 2 C].

Example: the byte 0x21 holds the codes 1 and 2, which are 0.5 and 1.0; with a scale of 4 the weights are 2 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import ml_dtypes
import numpy as np

from icejax.checkpoint.quantized.layouts import Layout, Part, QuantizedMatrix, Shape
from icejax.checkpoint.quantized.words import nibbles

FLOAT4, EXPONENTS = np.dtype(ml_dtypes.float4_e2m1fn), np.dtype(ml_dtypes.float8_e8m0fnu)
# Twice the number of each e2m1 code: 0, 1, 2, 3, 4, 6, 8, 12, then the same with a minus.
TWICE = (2 * np.arange(16, dtype=np.uint8).view(FLOAT4).astype(np.float32)).astype(np.int8)


def doubled(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Returns an e2m1 matrix as int8 numbers twice as large, with half the scale, as `Grouped` needs; others unchanged."""
    if matrix.codes.dtype != FLOAT4:
        return matrix
    return matrix._replace(codes=TWICE[matrix.codes.view(np.uint8)], scale=matrix.scale * np.float32(0.5))


@dataclass(frozen=True, kw_only=True)
class Float4(Layout):
    """The formats nvfp4-pack-quantized and mxfp4-pack-quantized of compressed-tensors.

    nvfp4 has an e4m3 scale per block, divided by one float32 scale of the matrix; mxfp4 has a power of two per block.

    Attributes:
        powers: whether scales are powers of two (mxfp4).
    """

    powers: bool

    @property
    def units(self) -> tuple[int, int]:
        return self.block[0] or 1, math.lcm(self.block[1] or 1, 2)  # a byte holds two codes of a row

    def parts(self, shape: Shape) -> dict[str, Part]:
        scales = {"weight_scale": Part(("U8", "F8_E8M0") if self.powers else ("F8_E4M3",), (self.grid(shape),))}
        scalars = {name: Part(("F32",), ((1,), ()), name[0] == "w") for name in ("weight_global_scale", "input_global_scale")}
        return {"weight_packed": Part(("U8",), ((shape[0], -(-shape[1] // 2)),))} | scales | ({} if self.powers else scalars)

    def codes(self, shape: Shape, parts: Mapping[str, np.ndarray]) -> QuantizedMatrix:
        scale = parts["weight_scale"]
        if self.powers:
            scale = self.scale(scale.view(EXPONENTS), shape)
        else:
            scale = self.scale(scale, shape) / parts["weight_global_scale"].reshape(())
        return QuantizedMatrix(_codes(parts["weight_packed"])[:, : shape[1]], scale, None)


@dataclass(frozen=True, kw_only=True)
class Mxfp4(Layout):
    """gpt-oss's form of turned expert matrices [E, I, O], stored as codes [E, O, I] in blocks of 32 along I.

    Each block has one scale, a power of two stored as its exponent (e8m0).
    """

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
    """Returns the codes in bytes u8[R, C]: float4_e2m1fn[R, 2 C]."""
    return nibbles(packed).view(FLOAT4)
