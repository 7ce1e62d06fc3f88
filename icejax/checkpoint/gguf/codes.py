"""Codes of GGUF's types with scales per group: their bits as numbers that products read (`icejax.ops.quantized`).

`icejax.checkpoint.tensors` gives matrices of these types this layout. A weight is code * scale, or
code * scale + offset; the offset is held as the code of the weight 0, (code - zero) * scale, in float32.

Example, Q4_1: the scale 0.5, the offset -2 and the code 7 are the weight 1.5; the zero is 4, and codes and zero are less 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from icejax.checkpoint.gguf.numbers import block_numbers
from icejax.checkpoint.quantized.float4 import FLOAT4
from icejax.checkpoint.quantized.layouts import Layout, Part, QuantizedMatrix, Shape

TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)  # of IQ4_NL and IQ4_XS
HALF = "<f2"


class Groups(NamedTuple):
    """The groups of N blocks.

    Attributes:
        codes: int8 or float4_e2m1fn [N, groups, g].
        scale: f32[N, groups].
        offset: f32[N, groups]; None: 0.
    """

    codes: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None = None


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """Returns the float16 number at a byte of each block, f32[N, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(HALF).astype(np.float32)


def _halves(packed: np.ndarray) -> np.ndarray:
    """Returns the 4-bit numbers of bytes u8[..., n]: all lower ones, then all upper ones, u8[..., 2 n]."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bits(words: np.ndarray) -> np.ndarray:
    """Returns the bits of bytes u8[N, n], the lowest first, u8[N, 8 n]."""
    return np.unpackbits(np.ascontiguousarray(words), axis=-1, bitorder="little")


def _signed(numbers: np.ndarray, less: int) -> np.ndarray:
    """Returns numbers u8[N, ...] less `less`, as int8[N, groups, g]."""
    return (numbers - np.uint8(less)).view(np.int8)


def _q4_0(blocks: np.ndarray) -> Groups:
    return Groups(_signed(_halves(blocks[:, None, 2:]), 8), _half(blocks, 0))


def _q4_1(blocks: np.ndarray) -> Groups:
    return Groups(_halves(blocks[:, None, 4:]).view(np.int8), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: np.ndarray) -> Groups:
    return Groups(_signed(_halves(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4, 16)[:, None], _half(blocks, 0))


def _q5_1(blocks: np.ndarray) -> Groups:
    numbers = _halves(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return Groups(numbers.view(np.int8)[:, None], _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: np.ndarray) -> Groups:
    return Groups(np.ascontiguousarray(blocks[:, None, 2:]).view(np.int8), _half(blocks, 0))


def _scales_and_offsets(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales and offsets f32[N, 8] of Q4_K and Q5_K: 6-bit factors of the block's scale and of its minimum."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    factors = np.concatenate([low & 63, (high & 15) | (low >> 2 & 48)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 2 & 48)], axis=-1)
    return _half(blocks, 0) * factors.astype(np.float32), -(_half(blocks, 2) * minima.astype(np.float32))


def _q4_k(blocks: np.ndarray) -> Groups:
    codes = _halves(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return Groups(codes.view(np.int8), *_scales_and_offsets(blocks))


def _q5_k(blocks: np.ndarray) -> Groups:
    high = _bits(blocks[:, 16:48]).reshape(-1, 32, 8).swapaxes(1, 2)
    codes = _halves(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | high << 4
    return Groups(codes.view(np.int8), *_scales_and_offsets(blocks))


def _q6_k(blocks: np.ndarray) -> Groups:
    low = _halves(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scale = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32) * _half(blocks, 208)
    return Groups(_signed(low | high << 4, 32).reshape(-1, 16, 16), scale)


def _iq4_nl(blocks: np.ndarray) -> Groups:
    return Groups(TABLE[_halves(blocks[:, None, 2:])], _half(blocks, 0))


def _iq4_xs(blocks: np.ndarray) -> Groups:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    scale = (low | high << 4).astype(np.float32) - 32
    return Groups(TABLE[_halves(blocks[:, 8:].reshape(-1, 8, 16))], _half(blocks, 0) * scale)


def _mxfp4(blocks: np.ndarray) -> Groups:
    return Groups(_halves(blocks[:, None, 1:]).view(FLOAT4), np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 127))


# Type -> the function that takes blocks u8[N, bytes] apart, bytes of a block, columns of a group, bits of a code.
TYPES: dict[str, tuple[Callable[[np.ndarray], Groups], int, int, int]] = {
    "Q4_0": (_q4_0, 18, 32, 4),
    "Q4_1": (_q4_1, 20, 32, 4),
    "Q5_0": (_q5_0, 22, 32, 8),
    "Q5_1": (_q5_1, 24, 32, 8),
    "Q8_0": (_q8_0, 34, 32, 8),
    "Q4_K": (_q4_k, 144, 32, 4),
    "Q5_K": (_q5_k, 176, 32, 8),
    "Q6_K": (_q6_k, 210, 16, 8),
    "IQ4_NL": (_iq4_nl, 18, 32, 8),
    "IQ4_XS": (_iq4_xs, 136, 32, 8),
    "MXFP4": (_mxfp4, 17, 32, 4),
}


@dataclass(frozen=True, kw_only=True)
class Blocks(Layout):
    """A matrix of a GGUF type, or the matrices of all experts; rows are blocks, one after the other.

    Attributes:
        kind: the type.
        turned: whether the parameter's shape is [E, I, O] where the stored matrices are [E, O, I].
    """

    block: tuple[int | None, int | None] = (1, 32)
    kind: str
    turned: bool = False

    @property
    def units(self) -> tuple[int, int]:
        return 1, block_numbers(self.kind)

    def groups(self, shape: Shape) -> int:
        return shape[1] // TYPES[self.kind][2]

    def parts(self, shape: Shape) -> dict[str, Part]:
        return {"weight": Part((self.kind,), (shape,))}

    def codes(self, shape: Shape, parts: Mapping[str, np.ndarray]) -> QuantizedMatrix:
        rows, columns = shape[::-1] if self.turned else shape
        decode, size, group, bits = TYPES[self.kind]
        (stored,) = parts.values()
        with np.errstate(all="ignore"):  # scales may be anything
            codes, scale, offset = decode(stored.reshape(-1, size))
            scale = scale.reshape(rows, columns // group)
            codes, zero = codes.reshape(rows, columns), None
            if offset is not None:
                codes, scale, zero = _with_zero(codes, scale, offset.reshape(scale.shape), group, less=8 if bits == 4 else 0)
        return QuantizedMatrix(codes, np.ascontiguousarray(scale), zero, bits if codes.dtype == np.int8 else 8)


def _with_zero(
    codes: np.ndarray, scale: np.ndarray, offset: np.ndarray, group: int, *, less: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes less `less`, scales, and the code of the weight 0 for each group.

    Of a group whose scale is 0 all weights are the offset: its codes are 0, its scale the offset, and its zero -1.
    """
    flat = scale == 0
    zero = np.where(flat, np.where(offset == 0, 0, -1), -offset / scale - less).astype(np.float32)
    codes = codes - np.int8(less)
    codes.reshape(*scale.shape, group)[flat] = 0
    return codes, np.where(flat, offset, scale), zero
