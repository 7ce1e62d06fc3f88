"""One form of a checkpoint folder into the other, bit for bit in the stored dtypes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from icejax import memory
from icejax.checkpoint import formats, huggingface, orbax
from icejax.checkpoint.folder import COMPANIONS, ORBAX, copy_companions, resolve
from icejax.checkpoint.load import Progress, abstract, made_of, read_config, tensors
from icejax.checkpoint.stacked import split
from icejax.errors import InputError
from icejax.folder import claim

CONFIG = "config.json"  # by which a checkpoint folder is known


def hf_to_orbax(source: str | Path, target: Path, *, force: bool = False, progress: Progress | None = None) -> None:
    """Writes the Hugging Face folder (or hub id) `source` as the icejax folder `target`, whole or not at all.

    Raises:
        InputError: `source` is not a sound Hugging Face checkpoint, or is quantised, or `target` cannot be written, or exists
            and `force` is False.
    """
    folder = resolve(source)
    if (folder / ORBAX).is_dir():
        raise InputError(f"{folder} is an icejax folder already: expected a Hugging Face folder")
    if (method := formats.method(huggingface.read_json(folder / CONFIG))) is not None:
        raise InputError(
            f"{folder} is quantised by {method}, which an icejax folder cannot keep bit for bit: load the folder as it is"
        )
    with claim(target, mark=CONFIG, replace=force) as held:
        _check_target(folder, target)
        shapes = _shapes(folder)
        held.check_room(sum(shard.stat().st_size for shard in huggingface.shards(folder)))
        with held.writing() as part:
            parameters = {}
            for done, (key, tensor) in enumerate(tensors(folder, read_config(folder), shapes), start=1):
                parameters[key] = tensor
                _tell(progress, key, done, len(shapes))
            copy_companions(folder, part)
            orbax.save(part / ORBAX, parameters)


def orbax_to_hf(source: Path, target: Path, *, force: bool = False, progress: Progress | None = None) -> None:
    """Writes the icejax folder `source` as the Hugging Face folder `target`, whole or not at all.

    Raises:
        InputError: `source` is not a sound icejax folder, or `target` cannot be written, or exists and `force` is False.
    """
    folder = resolve(source)
    if not (folder / ORBAX).is_dir():
        raise InputError(f"{folder} has no {ORBAX} folder in it: expected an icejax folder, as convert.hf_to_orbax writes")
    with claim(target, mark=CONFIG, replace=force) as held:
        _check_target(folder, target)
        shapes = _shapes(folder)
        held.check_room(sum(math.prod(x.shape) * x.dtype.itemsize for x in orbax.stored(folder / ORBAX).values()))
        stored = orbax.read(folder / ORBAX, shapes, device=memory.device("cpu"))
        parameters = split(made_of(folder, shapes), {name: np.asarray(x) for name, x in stored.items()})
        with held.writing() as part:
            copy_companions(folder, part)
            for done, key in enumerate(huggingface.write(part, parameters), start=1):
                _tell(progress, key, done, len(parameters))


def _check_target(source: Path, target: Path) -> None:
    """Raises InputError if what stands at `target` is the source, or holds what replacing it would lose."""
    if not target.exists():
        return
    if target.samefile(source):
        raise InputError(f"{target} is the source: choose another place")
    for name in sorted(file.name for file in target.iterdir()):
        if name not in (*COMPANIONS, ORBAX, huggingface.INDEX) and not name.endswith(".safetensors"):
            raise InputError(f"{target} holds more than a checkpoint ({name}): choose another place")


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {key: leaf.shape for key, leaf in abstract(read_config(folder), "float32")[1].items()}


def _tell(progress: Progress | None, key: str, done: int, total: int) -> None:
    if progress is not None:
        progress(key, done, total)
