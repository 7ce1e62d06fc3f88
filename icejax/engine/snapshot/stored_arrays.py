"""A file of named arrays: their bytes one after another, described by name, dtype, shape and checksum.

`session.storage` and `serving.prefix_folder` write and read it. Example: an array of 12 bytes and one of 8: the second starts
at byte 12, the file has 20 bytes.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax.numpy as jnp
import numpy as np

from icejax.engine.snapshot.fingerprint import damaged

OPTIONAL = "kept."  # prefix of the names of arrays that a reader may skip
BLOCK = 2**25  # bytes that are read at once to verify an array
MOST_BYTES = 2**63  # bytes of one array, exclusive
MOST_AXES = 64  # as in numpy; the product of a million sizes would take hours


class StoredArray(NamedTuple):
    """The description of an array.

    Attributes:
        dtype: name of the dtype.
        crc32: checksum of the array's bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    crc32: int

    @property
    def size(self) -> int:
        """Size of the array in bytes."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


class ArrayWriter:
    """Writes arrays into an open file, one after another.

    Attributes:
        described: each array's description by name.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.described = file, dict[str, dict[str, Any]]()

    def write(self, name: str, array: np.ndarray) -> None:
        """Writes the array's bytes at the end of the file."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.described[name] = StoredArray(str(array.dtype), array.shape, zlib.crc32(data))._asdict()
        self._file.write(data)


def described_arrays(path: Path, described: Any) -> dict[str, StoredArray]:
    """Returns the array descriptions `described`, as read from the session at `path`.

    Raises:
        InputError: a description is malformed.
    """
    if not isinstance(described, dict):
        damaged(path, "it does not say which arrays it has")
    arrays = {}
    for name, about in described.items():
        try:
            dtype, shape, checksum = (about[key] for key in StoredArray._fields)
            array = StoredArray(str(jnp.dtype(dtype)), tuple(shape), checksum)
            valid = len(array.shape) <= MOST_AXES and all(type(x) is int and x >= 0 for x in (*array.shape, checksum))
            valid = valid and max(array.shape, default=0) < MOST_BYTES and array.size < MOST_BYTES
        except (KeyError, TypeError, ValueError):
            valid = False
        if not valid:
            damaged(path, f"it does not say what {name} is")
        arrays[name] = array
    return arrays


class ArrayFile:
    """The open file of a session's arrays."""

    def __init__(self, path: Path, file: BinaryIO, arrays: Mapping[str, StoredArray]) -> None:
        """Finds where each array starts in the file.

        Args:
            path: path of the session, for messages.

        Raises:
            InputError: the file's size is not the sum of the arrays' sizes.
        """
        self._path, self._file, self._arrays, self._starts = path, file, arrays, {}
        end = 0
        for name, array in arrays.items():
            self._starts[name], end = end, end + array.size
        size = os.fstat(file.fileno()).st_size
        if size != end:
            damaged(path, f"arrays has {size} bytes, expected {end}")

    def expect(self, kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Raises InputError unless the arrays are `kinds` (dtype and shape by name), apart from optional ones."""
        unknown = [name for name in self._arrays if name not in kinds and not name.startswith(OPTIONAL)]
        missing = [name for name in kinds if name not in self._arrays]
        for names, fault in ((missing, "is missing"), (unknown, "is not one of this cache")):
            if names:
                damaged(self._path, f"array {names[0]} {fault}")
        for name, (dtype, shape) in kinds.items():
            array = self._arrays[name]
            if (array.dtype, array.shape) != (dtype, tuple(shape)):
                damaged(self._path, f"{name} is {array.dtype}{list(array.shape)}, expected {dtype}{list(shape)}")

    def read(self, name: str) -> np.ndarray:
        """Returns the array `name`; InputError if its bytes changed since they were saved."""
        array = self._arrays[name]
        data = np.empty(array.size, np.uint8)
        self._file.seek(self._starts[name])
        self._check(name, self._file.readinto(data), zlib.crc32(data))
        return data.view(jnp.dtype(array.dtype)).reshape(array.shape)

    def verify(self) -> None:
        """Raises InputError if any array's bytes changed since they were saved; reads block by block."""
        for name, array in self._arrays.items():
            self._file.seek(self._starts[name])
            checksum = length = 0
            while length < array.size and (block := self._file.read(min(BLOCK, array.size - length))):
                checksum, length = zlib.crc32(block, checksum), length + len(block)
            self._check(name, length, checksum)

    def _check(self, name: str, length: int, checksum: int) -> None:
        array = self._arrays[name]
        if (length, checksum) != (array.size, array.crc32):
            damaged(self._path, f"the bytes of {name} are not those that were saved")
