"""The files of a GGUF model: one, or a set of parts as llama-gguf-split writes it.

`icejax.checkpoint.folder` and `icejax.checkpoint.gguf.folder` call it.

Example: any of big-00001-of-00003.gguf, big-00002-of-00003.gguf and big-00003-of-00003.gguf stands for all three.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from icejax.checkpoint.gguf.metadata import Tensor, read_header
from icejax.checks.errors import InputError, listed, quoted

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.((?i:gguf))", re.DOTALL)
MOST_PARTS = 1000
PROJECTOR = "mmproj"  # in the name of a file with the image part of a model
STATISTICS = "imatrix"  # in the name of a file with the statistics that a quantisation used


class Model(NamedTuple):
    """The headers of a model's files.

    Attributes:
        files: the files in order.
        values: the first file's values by key.
        tensors: all tensors by name.
        header_sizes: bytes of each file's header.
    """

    files: tuple[Path, ...]
    values: dict[str, Any]
    tensors: dict[str, Tensor]
    header_sizes: tuple[int, ...]


def part_names(name: str) -> list[str]:
    """Returns the names of all parts of the set that a file of this name belongs to; its own name alone without a set."""
    match = PART.fullmatch(name)
    if match is None:
        return [name]
    stem, number, count = match[1], int(match[2]), int(match[3])
    if not 0 < number <= count <= MOST_PARTS:
        raise InputError(f"{quoted(name)}: expected a part's number up to the number of parts, and at most {MOST_PARTS} parts")
    return [f"{stem}-{i + 1:05}-of-{count:05}.{match[4]}" for i in range(count)]


def one_in(folder: Path) -> Path | None:
    """Returns the first file of the only GGUF model in a folder; None without one.

    Hidden files and files of statistics are no models. A lone file is a model even if its name speaks of statistics.

    Raises:
        InputError: there are several models, or nothing but image parts.
    """
    files = [file for file in folder.iterdir() if file.name.lower().endswith(".gguf") and not file.is_dir()]
    names = sorted(file.name for file in files if not file.name.startswith("."))
    models = [name for name in names if PROJECTOR not in name.lower()]
    if names and not models:
        raise InputError(f"{folder} holds a model's image part alone ({listed(names)}): add the language model's GGUF file")
    models = [name for name in models if STATISTICS not in name.lower()] or models
    firsts = sorted({part_names(name)[0] for name in models})
    if len(firsts) > 1:
        raise InputError(f"{folder} holds {len(firsts)} GGUF models: give one of the files ({listed(firsts)})")
    return folder / firsts[0] if firsts else None


def read_model(file: Path) -> Model:
    """Returns the headers of the GGUF file `file`, or of the set that it is a part of.

    Raises:
        InputError: a part is missing, belongs to another set or is no sound GGUF file; or a tensor is stored twice.
    """
    files = tuple(file.parent / name for name in part_names(file.name))
    if missing := [part.name for part in files if not part.exists()]:
        raise InputError(f"{file}: {len(missing)} of its {len(files)} parts are missing ({listed(missing)}): fetch them")
    headers = [read_header(part) for part in files]
    for i, (part, header) in enumerate(zip(files, headers, strict=True)):
        place = header.values.get("split.no", 0), header.values.get("split.count", 1) or 1
        if place != (i, len(files)):
            raise InputError(
                f"{part} says that it is part {place[0]} of {quoted(place[1])}, counted from 0, and its name that it is {i} of "
                f"{len(files)}: give all parts the names that they were published under"
            )
    tensors: dict[str, Tensor] = {}
    for part, header in zip(files, headers, strict=True):
        if twice := tensors.keys() & header.tensors.keys():
            raise InputError(f"{part} holds tensors of another part again ({listed(sorted(map(quoted, twice)))})")
        tensors |= header.tensors
    expected = headers[0].values.get("split.tensors.count", len(tensors))
    if len(files) > 1 and expected != len(tensors):
        raise InputError(f"{file}: its parts hold {len(tensors)} tensors, expected {quoted(expected)}: fetch them again")
    return Model(files, headers[0].values, tensors, tuple(header.size for header in headers))


def type_counts(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Returns how many tensors have each type, the most frequent first."""
    types = [tensor.type for tensor in tensors]
    return {kind: types.count(kind) for kind in sorted(set(types), key=lambda kind: (-types.count(kind), kind))}
