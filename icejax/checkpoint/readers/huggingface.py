"""Hugging Face folders: reads config.json, reads and writes safetensors one tensor at a time.

`icejax.checkpoint.load`, `icejax.checkpoint.tensors` and `icejax.checkpoint.convert` call it. A tensor keeps its stored shape
and one of DTYPES.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (registers bfloat16 and fp8 with numpy)
import numpy as np
from safetensors import SafetensorError, safe_open

from icejax.checkpoint import boxes
from icejax.checkpoint.boxes import Box
from icejax.checks import json_file
from icejax.checks.errors import InputError, listed, quoted

# Supported dtypes: safetensors' name -> numpy's name.
DTYPES = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "I8": "int8", "I32": "int32",
    "I64": "int64", "U8": "uint8", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 2**30  # as in transformers
# Prefix of files that hold the same weights again, which publishers put beside the shards.
OTHER_PACKAGING = ("consolidated",)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; InputError if the file is missing or holds no object."""
    try:
        return json_file.read(path)
    except FileNotFoundError:
        raise InputError(f"{path.parent} has no {path.name}: expected a Hugging Face or icejax checkpoint folder") from None


def shards(folder: Path) -> list[Path]:
    """Returns the safetensors files of `folder`, sorted by name.

    Raises:
        InputError: there are no files, or the index names a file that is missing or omits a file that is present.
    """
    present = {p.name for p in folder.glob("*.safetensors") if not p.name.startswith(OTHER_PACKAGING)}
    if not (folder / INDEX).exists():
        if len(present) == 1:
            return [folder / present.pop()]
        state = "none" if not present else f"{len(present)} and no {INDEX}"
        raise InputError(
            f"{folder}: expected one .safetensors file, or several with an index (.bin files are not read), found {state}"
        )
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{folder / INDEX}: 'weight_map' must be an object, got {quoted(weight_map)}")
    for key, name in weight_map.items():
        if not isinstance(name, str) or name in ("", ".", "..") or set("/\\\0") & set(name):
            raise InputError(f"{folder / INDEX}: expected the name of a file beside it for {quoted(key)}, got {quoted(name)}")
    named = set(weight_map.values())
    faults = [f"{name} is named in {INDEX} and missing" for name in sorted(named - present)]
    faults += [f"{name} is not named in {INDEX}" for name in sorted(present - named)]
    if faults:
        raise InputError(f"{folder}: {listed(faults)}: fetch the folder again, or remove what does not belong to it")
    return [folder / name for name in sorted(named)]


def keys(files: Iterable[Path]) -> Iterator[tuple[str, Path, tuple[int, ...], str]]:
    """Yields key, file, shape and dtype of every tensor, from the headers alone; InputError for a broken file."""
    for file in files:
        with _open(file) as tensors:
            for key in tensors.keys():  # noqa: SIM118 (not a dict)
                stored = tensors.get_slice(key)
                yield key, file, tuple(stored.get_shape()), stored.get_dtype()


def read_tensor(file: Path, key: str, box: Box | None = None) -> np.ndarray:
    """Returns one tensor, or a box of it, from its stored bytes.

    safetensors has no fp8 for numpy, and keeps the file's pages mapped.
    """
    status = file.stat() if file.is_file() else None
    data, header = _header(file, status and (status.st_size, status.st_mtime_ns))
    about = header[key]
    with file.open("rb", buffering=0) as stream:
        try:
            return boxes.read(stream, data + about["data_offsets"][0], about["shape"], np.dtype(DTYPES[about["dtype"]]), box)
        except EOFError:
            raise InputError(f"{file} is not a whole safetensors file (it ends within {key}): fetch it again") from None


@functools.lru_cache(maxsize=4)  # experts are thousands of tensors in one file, each read once for every device
def _header(file: Path, status: tuple[int, int] | None) -> tuple[int, dict[str, Any]]:
    """Returns where the data of a file begin, and its header; `status` is another one when the file has changed."""
    with _open(file):  # checks the header, and that the file holds all tensors it names
        pass
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        return 8 + size, json.loads(stream.read(size))


def _open(file: Path):
    try:
        if not file.is_file():  # opening a pipe would block
            raise OSError("it is no file")
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} is not a whole safetensors file ({error}): fetch it again") from None


def size(shape: tuple[int, ...], dtype: str) -> int:
    """Returns the bytes of a tensor, `dtype` being one of DTYPES."""
    return math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize


def write(
    folder: Path,
    about: Mapping[str, tuple[tuple[int, ...], str]],
    pieces: Iterable[tuple[str, int, np.ndarray]],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes tensors piece by piece, in any order, into one file, or into shards of at most `shard_bytes` with an index.

    Args:
        about: shape and dtype of each tensor, by key.
        pieces: key of a tensor, its first row that is written, and the rows.
        shard_bytes: the largest size of a shard; a larger tensor has a shard of its own.
    """
    sizes = {key: size(*entry) for key, entry in about.items()}
    groups: list[list[str]] = [[]]
    for key in sorted(about):
        if groups[-1] and sum(sizes[other] for other in groups[-1]) + sizes[key] > shard_bytes:
            groups.append([])
        groups[-1].append(key)
    single = len(groups) == 1
    names = ["model.safetensors" if single else f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    offsets: dict[str, tuple[Path, int]] = {}
    for name, group in zip(names, groups, strict=True):
        offsets |= _begin(folder / name, {key: about[key] for key in group})
    for key, start, array in pieces:
        (shape, dtype), (file, offset) = about[key], offsets[key]
        assert (array.shape[1:], array.dtype) == (shape[1:], DTYPES[dtype])
        with file.open("r+b") as stream:
            stream.seek(offset + start * size(shape[1:], dtype))
            stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        del array  # else two pieces are in memory while the next is made
    if not single:
        weight_map = {key: name for name, group in zip(names, groups, strict=True) for key in group}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))


def _begin(file: Path, about: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, tuple[Path, int]]:
    """Writes the header of a file, and returns file and byte offset of each tensor, by key.

    Tensors of wide dtypes come first, so that all are aligned.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in sorted(about, key=lambda key: (-size((), about[key][1]), key)):
        (shape, dtype), start = about[key], end
        end += size(shape, dtype)
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    return {key: (file, 8 + len(text) + header[key]["data_offsets"][0]) for key in about}
