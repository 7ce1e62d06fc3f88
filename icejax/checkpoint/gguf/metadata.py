"""The header of a GGUF file: its values by key and its table of tensors. Each number is checked before it is used.

`icejax.checkpoint.gguf.parts` calls it. A file begins with the letters GGUF, its version, the number of tensors and the number
of values; then come the values, the table of tensors, and the tensors' bytes, aligned.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from icejax.checks.errors import InputError, quoted

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), "general.alignment"
LARGEST_HEADER = 2**28  # bytes; that of a vocabulary of 262,144 tokens has 6 MiB
MOST_ITEMS = 2**22  # items of all arrays together
MOST_ENTRIES = 2**16  # tensors, and values
MOST_AXES = 4
STRING, ARRAY = 8, 9
# Types of values by their number in the file, as struct and numpy name them.
NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
LEAST_ENTRY, LEAST_VALUE = 32, 13  # fewest bytes of a tensor's entry, and of a key with its value


class Tensor(NamedTuple):
    """A tensor of a GGUF file.

    Attributes:
        file: the file that holds it.
        type: the type of its numbers, as GGUF names it.
        shape: its shape, rows first, as in numpy.
        start: offset of its first byte in the file.
        size: its bytes.
    """

    file: Path
    type: str
    shape: tuple[int, ...]
    start: int
    size: int


class Header(NamedTuple):
    """The header of a GGUF file.

    Attributes:
        values: its values by key; arrays of numbers are numpy arrays, arrays of texts are lists.
        tensors: its tensors by name.
        size: the header's bytes.
    """

    values: dict[str, Any]
    tensors: dict[str, Tensor]
    size: int


def read_header(file: Path) -> Header:
    """Returns the header of a GGUF file.

    Raises:
        InputError: the file is no GGUF file, or of a version or byte order that is not read, or is not whole, or its header
            contradicts itself or is too large.
    """
    if not file.is_file():  # opening a pipe would block
        raise InputError(f"{file} is no file: expected a GGUF file")
    size = file.stat().st_size
    with file.open("rb") as stream:
        reader = _Reader(stream, file, size)
        _check_start(reader)
        tensor_count, value_count = reader.number("<u8"), reader.number("<u8")
        for count, least, what in ((tensor_count, LEAST_ENTRY, "tensors"), (value_count, LEAST_VALUE, "values")):
            if count * least > reader.left:
                raise reader.fault(f"it promises {count} {what}, and is too short for them")
            if count > MOST_ENTRIES:
                raise reader.fault(f"it promises {count} {what}, more than the {MOST_ENTRIES} that are read")
        values = _values(reader, value_count)
        tensors = _tensors(reader, tensor_count, _alignment(reader, values), size)
        return Header(values, tensors, reader.position)


def is_gguf(file: Path) -> bool:
    """Says whether a file begins as a GGUF file does."""
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


class _Reader:
    """Reads a header from its beginning; InputError where the file ends too early.

    Attributes:
        position: the bytes read so far.
        items: items of arrays read so far.
    """

    def __init__(self, stream: BinaryIO, file: Path, size: int) -> None:
        self._stream, self._file, self._size = stream, file, size
        self.position = self.items = 0

    @property
    def left(self) -> int:
        """Bytes that the file still has."""
        return self._size - self.position

    def fault(self, what: str) -> InputError:
        return InputError(f"{self._file} is no sound GGUF file ({what}): fetch it again")

    def bytes(self, count: int, what: str = "header") -> bytes:
        if count > self.left:
            raise self.fault(f"it ends within its {what}")
        if self.position + count > LARGEST_HEADER:
            raise self.fault(f"its {what} makes the header larger than {LARGEST_HEADER} bytes")
        data = self._stream.read(count)
        if len(data) < count:
            raise self.fault(f"it ends within its {what}")
        self.position += count
        return data

    def number(self, dtype: str, what: str = "header") -> Any:
        dtype = np.dtype(dtype)
        return np.frombuffer(self.bytes(dtype.itemsize, what), dtype)[0].item()

    def text(self, what: str) -> str:
        size = struct.unpack("<Q", self.bytes(8, what))[0]
        data = self.bytes(size, what)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self.fault(f"its {what} is no UTF-8 text") from None


def _check_start(reader: _Reader) -> None:
    """Raises InputError unless the file begins as a GGUF file that can be read."""
    file = reader._file
    if (magic := reader.bytes(4)) != MAGIC:
        raise InputError(f"{file} is no GGUF file: it begins with {magic!r}, expected {MAGIC!r}")
    version = reader.number("<u4")
    if version and version % 2**16 == 0:
        raise InputError(f"{file} is a big-endian GGUF file, which is not read: fetch or convert a little-endian one")
    if version not in VERSIONS:
        raise InputError(f"{file} is GGUF of version {version}: expected 2 or 3; fetch or convert a newer file")


def _values(reader: _Reader, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(count):
        key = reader.text("keys")
        if key in values:
            raise reader.fault(f"it has {quoted(key)} twice")
        values[key] = _value(reader, reader.number("<u4", "values"), f"value of {quoted(key)}")
    return values


def _value(reader: _Reader, kind: int, what: str) -> Any:
    if kind in NUMBERS:
        return _neat(reader.number(NUMBERS[kind], what)) if kind == 6 else reader.number(NUMBERS[kind], what)
    if kind == STRING:
        return reader.text(what)
    if kind != ARRAY:
        raise reader.fault(f"the {what} has the unknown type {kind}")
    kind, count = reader.number("<u4", what), reader.number("<u8", what)
    reader.items += count
    least = 8 if kind == STRING else np.dtype(NUMBERS[kind]).itemsize if kind in NUMBERS else 0
    if kind == ARRAY:
        raise reader.fault(f"the {what} is an array of arrays")
    if not least:
        raise reader.fault(f"the {what} has items of the unknown type {kind}")
    if count * least > reader.left:
        raise reader.fault(f"the {what} promises {count} items, and the file is too short for them")
    if reader.items > MOST_ITEMS:
        raise reader.fault(f"its arrays have more than {MOST_ITEMS} items")
    if kind == STRING:
        return [reader.text(what) for _ in range(count)]
    return np.frombuffer(reader.bytes(count * least, what), NUMBERS[kind])


def _neat(value: float) -> float:
    """Returns the shortest decimal number that is `value` in float32: 1e-06 for 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def _alignment(reader: _Reader, values: dict[str, Any]) -> int:
    alignment = values.get(ALIGNMENT, 32)
    if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise reader.fault(f"its {ALIGNMENT} must be a power of two of at most {2**20}, and is {quoted(alignment)}")
    return alignment


def _tensors(reader: _Reader, count: int, alignment: int, size: int) -> dict[str, Tensor]:
    """Returns the tensors by name, which lie in the file of `size` bytes after the header, one after the other."""
    entries = []
    for _ in range(count):
        name = reader.text("tensors' names")
        axes = reader.number("<u4", "table of tensors")
        if not 0 < axes <= MOST_AXES:
            raise reader.fault(f"the tensor {quoted(name)} has {axes} axes")
        shape = tuple(reader.number("<u8", "table of tensors") for _ in range(axes))[::-1]
        entries.append((name, shape, *(reader.number(dtype, "table of tensors") for dtype in ("<u4", "<u8"))))
    begin = math.ceil(reader.position / alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise reader.fault(f"it has the tensor {quoted(name)} twice")
        tensor = Tensor(reader._file, *_form(reader.fault, name, shape, kind), begin + offset, 0)
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.type]]
        tensor = tensor._replace(size=math.prod(shape) // block * block_bytes)
        if offset % alignment:
            raise reader.fault(f"the tensor {quoted(name)} begins at {offset}, which is no multiple of {alignment}")
        if tensor.start + tensor.size > size:
            raise reader.fault(f"the tensor {quoted(name)} reaches past its end")
        tensors[name] = tensor
    order = sorted(tensors.items(), key=lambda item: item[1].start)
    for (name, tensor), (other, behind) in zip(order, order[1:], strict=False):
        if tensor.start + tensor.size > behind.start:
            raise reader.fault(f"the tensors {quoted(name)} and {quoted(other)} overlap")
    return tensors


def _form(fault: Callable[[str], InputError], name: str, shape: tuple[int, ...], kind: int) -> tuple[str, tuple[int, ...]]:
    """Returns the type and shape of a tensor; InputError for an unknown type, or a shape that it cannot have."""
    try:
        kind = GGMLQuantizationType(kind)
    except ValueError:
        raise fault(f"the tensor {quoted(name)} has the unknown type {kind}") from None
    block, _ = GGML_QUANT_SIZES[kind]
    if not all(shape) or math.prod(shape) >= 2**63 or shape[-1] % block:
        raise fault(f"the tensor {quoted(name)} has shape {list(shape)}, which {kind.name} in blocks of {block} cannot have")
    return kind.name, shape
