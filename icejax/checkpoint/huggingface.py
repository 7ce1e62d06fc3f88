"""Hugging Face folders: config.json and safetensors, read tensor by tensor, and written."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (numpy knows bfloat16 and fp8 by it)
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from icejax import jsontext
from icejax.errors import InputError, listed, quoted

# What is read, as safetensors names it.
DTYPES = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "I8": "int8", "I32": "int32",
    "I64": "int64", "U8": "uint8", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 2**30  # as in transformers
# Other packagings of the same weights that publishers put beside the shards.
OTHER_PACKAGING = ("consolidated",)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object of a file; InputError if the file is missing or holds none."""
    try:
        return jsontext.read(path)
    except FileNotFoundError:
        raise InputError(f"{path.parent} has no {path.name}: expected a Hugging Face or icejax checkpoint folder") from None


def shards(folder: Path) -> list[Path]:
    """Returns the safetensors files of `folder`, in order.

    Raises:
        InputError: there are none, one that the index names is missing, or one is there that the index does not name.
    """
    present = {p.name for p in folder.glob("*.safetensors") if not p.name.startswith(OTHER_PACKAGING)}
    if not (folder / INDEX).exists():
        if len(present) == 1:
            return [folder / present.pop()]
        found = "none" if not present else f"{len(present)} and no {INDEX}"
        raise InputError(
            f"{folder}: expected one .safetensors file, or several with an index (.bin files are not read), found {found}"
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
    """Yields key, file, shape and dtype of every tensor, reading headers only; InputError for a broken file."""
    for file in files:
        with _open(file) as tensors:
            for key in tensors.keys():  # noqa: SIM118 (not a dict)
                stored = tensors.get_slice(key)
                yield key, file, tuple(stored.get_shape()), stored.get_dtype()


def read_tensor(file: Path, key: str) -> np.ndarray:
    """Returns one tensor of DTYPES as stored, from its bytes: safetensors brings numpy no fp8, and its pages stay mapped."""
    with _open(file):  # so its header is whole, and what that names is there
        pass
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        about = json.loads(stream.read(size))[key]
        stream.seek(8 + size + about["data_offsets"][0])
        shape = about["shape"]
        return np.fromfile(stream, np.dtype(DTYPES[about["dtype"]]), math.prod(shape)).reshape(shape)


def _open(file: Path):
    try:
        if not file.is_file():  # a pipe would be waited for
            raise OSError("it is no file")
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} is not a whole safetensors file ({error}): fetch it again") from None


def write(folder: Path, tensors: dict[str, np.ndarray], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes `tensors` in shards of at most `shard_bytes` with an index, or one file."""
    groups: list[dict[str, np.ndarray]] = [{}]
    for key in sorted(tensors):
        if groups[-1] and sum(t.nbytes for t in groups[-1].values()) + tensors[key].nbytes > shard_bytes:
            groups.append({})
        groups[-1][key] = tensors[key]
    single = len(groups) == 1
    names = ["model.safetensors" if single else f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    for name, group in zip(names, groups, strict=True):
        save_file(group, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # it comes readable by its owner alone
    if not single:
        total = sum(t.nbytes for t in tensors.values())
        weight_map = {key: name for name, group in zip(names, groups, strict=True) for key in group}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
