"""The arrays of a saved session: one file of bytes, described by name, dtype, shape and checksum."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax.numpy as jnp
import numpy as np

from icejax.session.fingerprint import damaged

OPTIONAL = "kept."  # what the names of arrays begin with that a reader may pass over
BLOCK = 2**25  # bytes that are verified at once
MOST_BYTES = 2**63


class StoredArray(NamedTuple):
    """What the description says of an array.

    Attributes:
        dtype: by name.
        crc32: checksum of its bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    crc32: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def write_arrays(path: Path, arrays: Iterable[tuple[str, np.ndarray]]) -> dict[str, dict[str, Any]]:
    """Writes arrays one behind the other, and returns what the description says of each."""
    described = {}
    with open(path, "wb") as file:
        for name, array in arrays:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            described[name] = StoredArray(str(array.dtype), array.shape, zlib.crc32(data))._asdict()
            file.write(data)
    return described


def described_arrays(path: Path, described: Any) -> dict[str, StoredArray]:
    """Returns the arrays that a description of the session at `path` lists; InputError if that cannot be true."""
    if not isinstance(described, dict):
        damaged(path, "it does not say which arrays it has")
    found = {}
    for name, about in described.items():
        try:
            dtype, shape, checksum = (about[key] for key in StoredArray._fields)
            array = StoredArray(str(jnp.dtype(dtype)), tuple(shape), checksum)
            sound = all(type(x) is int and x >= 0 for x in (*array.shape, checksum)) and array.size < MOST_BYTES
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound:
            damaged(path, f"it does not say what {name} is")
        found[name] = array
    return found


class ArrayFile:
    """The open file of a session's arrays."""

    def __init__(self, path: Path, file: BinaryIO, arrays: Mapping[str, StoredArray]) -> None:
        """Raises InputError if the file has another size than its arrays.

        Args:
            path: of the session, for messages.
        """
        self._path, self._file, self._arrays, self._starts = path, file, arrays, {}
        end = 0
        for name, array in arrays.items():
            self._starts[name], end = end, end + array.size
        size = os.fstat(file.fileno()).st_size
        if size != end:
            damaged(path, f"arrays has {size} bytes, expected {end}")

    def expect(self, kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Raises InputError unless there are these arrays, by name, dtype and shape, and no others but optional ones."""
        others = [name for name in self._arrays if name not in kinds and not name.startswith(OPTIONAL)]
        missing = [name for name in kinds if name not in self._arrays]
        for names, what in ((missing, "is missing"), (others, "is not one of this cache")):
            if names:
                damaged(self._path, f"array {names[0]} {what}")
        for name, (dtype, shape) in kinds.items():
            array = self._arrays[name]
            if (array.dtype, array.shape) != (dtype, tuple(shape)):
                damaged(self._path, f"{name} is {array.dtype}{list(array.shape)}, expected {dtype}{list(shape)}")

    def read(self, name: str) -> np.ndarray:
        """Returns an array; InputError if its bytes are not those that were saved."""
        array = self._arrays[name]
        data = np.empty(array.size, np.uint8)
        self._file.seek(self._starts[name])
        self._check(name, self._file.readinto(data), zlib.crc32(data))
        return data.view(jnp.dtype(array.dtype)).reshape(array.shape)

    def verify(self) -> None:
        """Raises InputError if a byte is not as it was saved; reads block by block."""
        for name, array in self._arrays.items():
            self._file.seek(self._starts[name])
            checksum = done = 0
            while done < array.size and (piece := self._file.read(min(BLOCK, array.size - done))):
                checksum, done = zlib.crc32(piece, checksum), done + len(piece)
            self._check(name, done, checksum)

    def _check(self, name: str, length: int, checksum: int) -> None:
        array = self._arrays[name]
        if (length, checksum) != (array.size, array.crc32):
            damaged(self._path, f"the bytes of {name} are not those that were saved")
