"""Boxes of arrays, a slice per axis: a device's share of a tensor is read from a file without the rest.

The readers of safetensors and GGUF files call `read`, that of Orbax folders `chunk_shape`.

Example: the box (0:2, 4:6) of a matrix f32[8, 6] is the bytes 16 to 24 and 40 to 48.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from io import RawIOBase

import numpy as np

from icejax.checkpoint import aligned

Box = tuple[slice, ...]  # with both bounds, from 0 to an axis's size, and without steps
PARTS = 8  # chunks down and across a matrix: half, a quarter or an eighth of it is read without the rest
LEAST_BYTES = 2**16  # of a chunk that has a part of the columns: more chunks would cost more time than reading them


def whole(shape: Sequence[int]) -> Box:
    """Returns the box of a whole array."""
    return tuple(slice(0, size) for size in shape)


def sizes(box: Box) -> tuple[int, ...]:
    """Returns the shape of a box."""
    return tuple(axis.stop - axis.start for axis in box)


def within(box: Box, outer: Box) -> Box:
    """Returns a box as a box of `outer`, which contains it."""
    return tuple(slice(axis.start - other.start, axis.stop - other.start) for axis, other in zip(box, outer, strict=True))


def chunk_shape(shape: Sequence[int], item: int) -> tuple[int, ...]:
    """Returns the shape of the chunks in which an array is stored that is to be read in boxes.

    A chunk has an eighth of a matrix's rows, of whose columns it has an eighth or all, by its size. Of the matrices of all
    experts it has a part of one, and it has a vector whole. An array of four axes has an expert's rows in blocks (MXFP4).

    Args:
        shape: shape of the array.
        item: bytes of a number.
    """
    if len(shape) < 2:
        return tuple(max(size, 1) for size in shape)
    if len(shape) > 3:
        return (1, max(-(-shape[1] // PARTS), 1), *(max(size, 1) for size in shape[2:]))
    rows, columns = (max(-(-size // PARTS), 1) for size in shape[-2:])
    if rows * columns * item < LEAST_BYTES:
        columns = max(shape[-1], 1)
    return (*(1,) * (len(shape) - 2), rows, columns)


def read(stream: RawIOBase, start: int, shape: Sequence[int], dtype: np.dtype, box: Box | None = None) -> np.ndarray:
    """Returns a box of an array whose rows follow each other in an unbuffered file from the byte `start` on; None: all of it.

    No other bytes are read.

    Raises:
        EOFError: the file ends within the box.
    """
    box, item = whole(shape) if box is None else box, np.dtype(dtype).itemsize
    array = aligned.empty(sizes(box), dtype)
    strides = [item * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    cut = [axis for axis in range(len(shape)) if array.shape[axis] < shape[axis]]
    outer = cut[-1] if cut else 0  # the axes from here on are one stretch of bytes for each place on the axes before
    first = start + sum(axis.start * stride for axis, stride in zip(box, strides, strict=True))
    steps = (np.arange(size) * stride for size, stride in zip(array.shape[:outer], strides, strict=False))
    offsets = first + functools.reduce(np.add.outer, steps, np.int64(0)).reshape(-1)
    stretches = array.reshape(len(offsets), math.prod(array.shape[outer:])).view(np.uint8)
    for offset, stretch in zip(offsets.tolist(), stretches, strict=True):
        stream.seek(offset)
        view = memoryview(stretch)
        while view:
            if not (count := stream.readinto(view)):
                raise EOFError
            view = view[count:]
    return array
