"""The pieces of a folder's tensors that a conversion writes: whole tensors, or on a mesh the rows of each device in turn.

`icejax.checkpoint.convert` calls it. A piece is dtype[rows, ...], with all other axes of its tensor. The rows of a device are
whole chunks of an Orbax folder.

Example, a matrix [576, 64] on three devices: its chunks have 72 rows, so the devices have the rows from 0, 216 and 432 on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from icejax.checkpoint import boxes
from icejax.checkpoint.quantized.formats import Source
from icejax.checkpoint.readers import huggingface
from icejax.checkpoint.tensors import Stored, Tensors
from icejax.runtime.mesh import Mesh


class Piece(NamedTuple):
    """Rows of a tensor, entries of its first axis.

    Attributes:
        key: key of the tensor.
        start: the first row; 0 for an array without axes.
        array: the rows.
    """

    key: str
    start: int
    array: np.ndarray


def pieces(tensors: Tensors, mesh: Mesh | None) -> Iterator[Piece]:
    """Yields the pieces of all tensors; one is in memory at a time, and its codes if it is rounded.

    A device of a mesh rounds its rows itself. A tensor that cannot be read in boxes is one piece, the first device's.
    """
    for key, source in tensors.sources.items():
        if source.method is not None:
            yield from _rounded(source, tensors.stored[key], mesh)
            continue
        for part in (part for part in source.parts if part in tensors.stored):
            stored = tensors.stored[part]
            for _, rows in _shares(stored, mesh):
                yield Piece(part, 0 if rows is None else rows.start, _read(stored, rows))


def largest(about: Mapping[str, tuple[tuple[int, ...], str]], mesh: Mesh | None) -> int:
    """Returns the bytes of the largest piece of tensors with these shapes and dtypes, if all of them are read in boxes."""
    sizes = []
    for shape, dtype in about.values():
        rows = _stretches(shape, mesh)[0].stop if shape else 1
        sizes.append(huggingface.size((rows, *shape[1:]), dtype))
    return max(sizes)


def _rounded(source: Source, stored: Stored, mesh: Mesh | None) -> Iterator[Piece]:
    for device, rows in _shares(stored, mesh):
        start = 0 if rows is None else rows.start
        with jax.default_device(device):
            parts = source.rounded(_read(stored, rows))
        for key in list(parts):
            if start == 0 or parts[key].ndim > 1:  # the shape of the matrix is no part of its rows
                yield Piece(key, start, parts.pop(key))


def _read(stored: Stored, rows: slice | None) -> np.ndarray:
    return stored.read() if rows is None else stored.read((rows, *boxes.whole(stored.shape[1:])))


def _shares(stored: Stored, mesh: Mesh | None) -> Iterator[tuple[jax.Device | None, slice | None]]:
    """Yields the devices and their rows of a tensor; None: the default device, and all rows."""
    if mesh is None:
        yield None, None
        return
    stretches = _stretches(stored.shape, mesh) if stored.in_boxes and stored.shape else [None]
    yield from zip(mesh.devices.devices.flat, stretches, strict=False)


def _stretches(shape: Sequence[int], mesh: Mesh | None) -> list[slice]:
    """Returns the rows of each device that has any, in whole chunks."""
    if mesh is None:
        return [slice(0, shape[0])]
    chunk = boxes.chunk_shape(shape, 1)[0]  # the size of a number counts for columns alone
    step = -(-shape[0] // (chunk * mesh.size)) * chunk or 1
    return [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)] or [slice(0, 0)]
