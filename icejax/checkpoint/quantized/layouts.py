"""Layouts of quantised matrices in a checkpoint: the stored tensors of a matrix, and how their bits become codes.

`icejax.checkpoint.quantized.formats` chooses a layout by config.json. A matrix [O, I] is read as codes [O, I], with scales and
zero points [O, G]: a weight is (code - zero) * scale.

Examples:
    spread: a matrix [3, 6] in blocks of 2 rows and 4 columns has scales [[1, 2], [3, 4]]. The last blocks are cut, so groups
        have gcd(6, 4) = 2 columns, and the scales per group are [[1, 1, 2], [1, 1, 2], [3, 3, 4]].
    weights: codes [[1, 2, 3, 4]], zero points [[1, 0]] and scales [[0.5, 2]] are the weights [[0, 0.5, 6, 8]].
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import ml_dtypes
import numpy as np

from icejax.checkpoint.quantized.words import pack, signed, unpack, word_count
from icejax.checks.errors import InputError

FLOATS = ("F32", "F16", "BF16")  # as safetensors names them
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds each of its eight output rows
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One of the stored tensors that a parameter is read from.

    Attributes:
        dtypes: the dtypes that it can have.
        shapes: the shapes that it can have.
        needed: whether the parameter cannot be read without it.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    needed: bool = True

    def faults(self, key: str, shape: Shape, dtype: str) -> list[str]:
        """Returns the fault of a stored tensor's shape or dtype."""
        if shape not in self.shapes:
            return [f"{key} has shape {list(shape)}, expected {' or '.join(str(list(allowed)) for allowed in self.shapes)}"]
        if dtype not in self.dtypes:
            return [f"{key}: dtype {dtype} is not supported: expected {', '.join(self.dtypes)}"]
        return []


class QuantizedMatrix(NamedTuple):
    """A matrix [O, I], or several, whose rows are cut into G groups of equal size: a weight is (code - zero) * scale.

    Attributes:
        codes: int8, float8_e4m3fn or float4_e2m1fn [..., O, I].
        scale: f32[..., O, G].
        zero: int8 or float32 [..., O, G]; None: 0.
        bits: bits of an int8 code.
    """

    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None
    bits: int = 8

    def weights(self) -> np.ndarray:
        """Returns the weights, f32[..., O, I]."""
        if self.codes.dtype == np.int8:
            weights = self.codes.astype(np.float32)
        else:  # a table of all codes: several times faster than a cast
            count = 2 ** ml_dtypes.finfo(self.codes.dtype).bits
            weights = np.arange(count, dtype=np.uint8).view(self.codes.dtype).astype(np.float32)[self.codes.view(np.uint8)]
        groups = weights.reshape(*self.scale.shape, -1)
        if self.zero is not None:
            groups -= self.zero[..., None]
        groups *= self.scale[..., None]
        return weights


@dataclass(frozen=True, kw_only=True)
class Layout(abc.ABC):
    """How a matrix [O, I] is stored as codes.

    Attributes:
        block: rows and columns that share a scale; None: all rows, all columns.
        axes: axes of the parameter: 2, or 3 for the matrices of all experts, whose stored tensors have experts first.
        uncut: names of stored tensors that `check` needs whole.
    """

    block: tuple[int | None, int | None]
    axes: ClassVar[int] = 2
    uncut: ClassVar[tuple[str, ...]] = ()

    @property
    def units(self) -> tuple[int, int]:
        """Rows and columns that cannot be read apart, because they share a scale or a word."""
        return self.block[0] or 1, self.block[1] or 1

    def prefix(self, key: str) -> str:
        """Returns the prefix of the stored tensors' names for the parameter `key`."""
        return key.removesuffix("weight")

    @abc.abstractmethod
    def parts(self, shape: Shape) -> dict[str, Part]:
        """Returns the stored tensors of a matrix of `shape`, by their names after the prefix."""

    def check(self, shape: Shape, parts: Mapping[str, np.ndarray]) -> None:  # noqa: B027 (few layouts have anything to check)
        """Raises InputError for faults of the stored tensors of a whole matrix that their shapes and dtypes do not show."""

    @abc.abstractmethod
    def codes(self, shape: Shape, parts: Mapping[str, np.ndarray]) -> QuantizedMatrix:
        """Returns the matrix, or a window of it that has `shape`, from its stored tensors or their boxes."""

    def groups(self, shape: Shape) -> int:
        """Returns the number of groups of a row in a matrix of `shape`."""
        return shape[1] // math.gcd(shape[1], self.block[1] or shape[1])

    def about(self, shape: Shape) -> dict[str, tuple[Shape, str]]:
        """Returns shape and dtype of the tensors that `stored` (of Plain and Packed) makes of a matrix of `shape`, by name."""
        needed = {name: part for name, part in self.parts(shape).items() if part.needed}
        return {name: (part.shapes[0], "BF16" if part.dtypes == FLOATS else part.dtypes[0]) for name, part in needed.items()}

    def grid(self, shape: Shape) -> tuple[int, int]:
        """Returns the number of blocks of a matrix of `shape`, down and across."""
        down, across = (math.ceil(size / (block or size)) for size, block in zip(shape, self.block, strict=True))
        return down, across

    def spread(self, values: np.ndarray, shape: Shape) -> np.ndarray:
        """Returns a value per block as one per row and group, [O, G]; groups have equal size even if a block is cut."""
        rows, columns = (min(block or size, size) for size, block in zip(shape, self.block, strict=True))
        group = math.gcd(shape[1], columns)
        tall = np.repeat(values.reshape(self.grid(shape)), rows, axis=0)[: shape[0]]
        return np.repeat(tall, columns // group, axis=1)[:, : shape[1] // group]

    def scale(self, values: np.ndarray, shape: Shape) -> np.ndarray:
        """Returns stored scales as f32[O, G]."""
        return self.spread(values.astype(np.float32), shape)

    def flat(self, shape: Shape) -> tuple[Shape, ...]:
        """Returns the shapes that a tensor of one value per block can have: axes of one block may be left out."""
        grid = self.grid(shape)
        return tuple(dict.fromkeys((grid, grid[:1]) if grid[1] == 1 else (grid,))) + (((),) if grid == (1, 1) else ())


@dataclass(frozen=True, kw_only=True)
class Plain(Layout):
    """One code per element of `weight`: fp8, and compressed-tensors' float-quantized and int-quantized.

    Attributes:
        dtype: dtype of the codes, as safetensors names it.
        scale_name: name of the stored scales.
    """

    dtype: str
    scale_name: str

    def parts(self, shape: Shape) -> dict[str, Part]:
        # Scales of activations are ignored: activations are not rounded here.
        unused = {name: Part(FLOATS, ((), (1,)), needed=False) for name in ("input_scale", "activation_scale")}
        if self.dtype == "I8":
            unused["input_zero_point"] = Part(("I8",), ((), (1,)), needed=False)
            unused["weight_zero_point"] = Part(("I8",), self.flat(shape), needed=False)
        return {"weight": Part((self.dtype,), (shape,)), self.scale_name: Part(FLOATS, self.flat(shape))} | unused

    def codes(self, shape: Shape, parts: Mapping[str, np.ndarray]) -> QuantizedMatrix:
        zero = parts.get("weight_zero_point")
        scale = self.scale(parts[self.scale_name], shape)
        return QuantizedMatrix(parts["weight"], scale, None if zero is None else self.spread(zero, shape))

    def stored(self, matrix: QuantizedMatrix, shape: Shape) -> dict[str, np.ndarray]:
        """Returns the stored tensors of symmetric codes, with scales in bfloat16, of rows of a matrix of `shape`."""
        return {"weight": matrix.codes, self.scale_name: matrix.scale.astype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, kw_only=True)
class Packed(Layout):
    """compressed-tensors' pack-quantized: a word holds codes of several columns of a row, or zero points of several rows.

    Attributes:
        bits: bits of a code, 4 or 8; a word holds 32 / bits codes.
        symmetric: whether there are no zero points.
    """

    bits: int
    symmetric: bool

    def parts(self, shape: Shape) -> dict[str, Part]:
        rows, columns = shape
        down, across = self.grid(shape)
        zero = Part(("I32",), ((word_count(down, self.bits), across),), needed=not self.symmetric)
        return {
            "weight_packed": Part(("I32",), ((rows, word_count(columns, self.bits)),)),
            "weight_scale": Part(FLOATS, self.flat(shape)),
            "weight_zero_point": zero,
            "weight_shape": Part(("I64", "I32"), ((2,),)),
        }

    @property
    def units(self) -> tuple[int, int]:
        rows, columns = super().units
        return rows * (1 if self.symmetric else 32 // self.bits), math.lcm(columns, 32 // self.bits)

    def check(self, shape: Shape, parts: Mapping[str, np.ndarray]) -> None:
        if tuple(stored := parts["weight_shape"].tolist()) != shape:
            raise InputError(f"weight_shape says {stored}, expected {list(shape)}")

    def codes(self, shape: Shape, parts: Mapping[str, np.ndarray]) -> QuantizedMatrix:
        codes = signed(unpack(parts["weight_packed"], self.bits)[:, : shape[1]], self.bits)
        zero = parts.get("weight_zero_point")
        if zero is not None:
            stored = unpack(zero.T, self.bits)[:, : self.grid(shape)[0]].T
            zero = self.spread(signed(stored, self.bits), shape)
        return QuantizedMatrix(codes, self.scale(parts["weight_scale"], shape), zero, self.bits)

    def stored(self, matrix: QuantizedMatrix, shape: Shape) -> dict[str, np.ndarray]:
        """Returns the stored tensors of symmetric codes, with scales in bfloat16, of rows of a matrix of `shape`."""
        return {
            "weight_packed": pack(matrix.codes.view(np.uint8) + np.uint8(2 ** (self.bits - 1)), self.bits),
            "weight_scale": matrix.scale.astype(ml_dtypes.bfloat16),
            "weight_shape": np.array(shape, np.int64),
        }


@dataclass(frozen=True, kw_only=True)
class Awq(Layout):
    """AutoAWQ's gemm form: qweight [I, O / 8] and zero points [G, O / 8], words of eight output rows in the order AWQ_ORDER."""

    def parts(self, shape: Shape) -> dict[str, Part]:
        groups, words = self.grid(shape)[1], word_count(shape[0], 4)
        return {
            "qweight": Part(("I32",), ((shape[1], words),)),
            "qzeros": Part(("I32",), ((groups, words),)),
            "scales": Part(FLOATS, ((groups, shape[0]),)),
        }

    @property
    def units(self) -> tuple[int, int]:
        return 8, super().units[1]

    def codes(self, shape: Shape, parts: Mapping[str, np.ndarray]) -> QuantizedMatrix:
        def nibbles(words: np.ndarray) -> np.ndarray:
            eights = unpack(words, 4).reshape(*words.shape, 8)[..., AWQ_ORDER]
            return np.ascontiguousarray(signed(eights.reshape(len(words), -1)[:, : shape[0]], 4).T)

        zero = self.spread(nibbles(parts["qzeros"]), shape)
        return QuantizedMatrix(nibbles(parts["qweight"]), self.scale(parts["scales"].T, shape), zero, bits=4)


@dataclass(frozen=True, kw_only=True)
class Gptq(Layout):
    """GPTQ's form, here in 4 bits: qweight [I / 8, O], words of eight input columns; zero points [G, O / 8], of output rows.

    Attributes:
        bits: bits of a code, 4 or 8; a word holds 32 / bits codes.
        less: number by which stored zero points are too small: 1 in gptq, 0 in gptq_v2.
    """

    bits: int
    less: int
    uncut: ClassVar[tuple[str, ...]] = ("g_idx",)

    def parts(self, shape: Shape) -> dict[str, Part]:
        rows, columns = shape
        groups = self.grid(shape)[1]
        return {
            "qweight": Part(("I32",), ((word_count(columns, self.bits), rows),)),
            "qzeros": Part(("I32",), ((groups, word_count(rows, self.bits)),)),
            "scales": Part(FLOATS, ((groups, rows),)),
            "g_idx": Part(("I32",), ((columns,),)),
            "bias": Part(FLOATS, ((rows,),), needed=False),  # AutoGPTQ writes a bias of zeros where the model has none
        }

    @property
    def units(self) -> tuple[int, int]:
        return 32 // self.bits, math.lcm(super().units[1], 32 // self.bits)

    def check(self, shape: Shape, parts: Mapping[str, np.ndarray]) -> None:
        if not np.array_equal(parts["g_idx"], np.arange(shape[1]) // (self.block[1] or shape[1])):
            raise InputError("g_idx is not in order (act-order is not supported)")
        if "bias" in parts and parts["bias"].any():
            raise InputError("bias is not zero, but config.json says that the format has none")

    def codes(self, shape: Shape, parts: Mapping[str, np.ndarray]) -> QuantizedMatrix:
        codes = signed(unpack(parts["qweight"].T, self.bits)[:, : shape[1]], self.bits)
        zero = unpack(parts["qzeros"], self.bits)[:, : shape[0]].T + np.uint8(self.less)
        zero = signed(zero & np.uint8(2**self.bits - 1), self.bits)
        return QuantizedMatrix(codes, self.scale(parts["scales"].T, shape), self.spread(zero, shape), self.bits)
