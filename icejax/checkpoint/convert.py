"""One form of a checkpoint folder into the other, bit for bit in the stored dtypes, or rounded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from icejax.checkpoint.folder import COMPANIONS, ORBAX, companions, resolve
from icejax.checkpoint.load import Progress, abstract, read_config
from icejax.checkpoint.quantized.rounding import METHODS
from icejax.checkpoint.readers import huggingface, orbax
from icejax.checkpoint.tensors import Tensors, open_tensors
from icejax.checks.errors import InputError, listed
from icejax.files.atomic_folder import claim

About = Mapping[str, tuple[tuple[int, ...], str]]  # shape and dtype of tensors, by key
CONFIG = "config.json"  # by which a checkpoint folder is known


def hf_to_orbax(
    source: str | Path,
    target: Path,
    *,
    quantize: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes the Hugging Face folder (or hub id) `source` as the icejax folder `target`, whole or not at all.

    Tensors are read and written one by one, so that host memory never holds more than two of the largest; that there is room
    for all is known before the first is read.

    Args:
        quantize: int8, fp8 or int4, to which matrices are rounded as `load_model` does: then `target` is in the form of
            compressed-tensors. None: all tensors stay as they are.

    Raises:
        InputError: `source` is not a sound Hugging Face checkpoint, or is not to be rounded, as experts in one tensor, or
            `target` cannot be written, or exists and `force` is False.
    """
    folder = resolve(source)
    if (folder / ORBAX).is_dir():
        raise InputError(f"{folder} is an icejax folder already: expected a Hugging Face folder")
    _convert(folder, target, lambda part, *tensors: orbax.save(part / ORBAX, *tensors), quantize, force, progress)


def orbax_to_hf(
    source: str | Path,
    target: Path,
    *,
    quantize: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes the icejax folder `source` as the Hugging Face folder `target`, whole or not at all; else as `hf_to_orbax`.

    Raises:
        InputError: `source` is not a sound icejax folder, or is not to be rounded, or `target` cannot be written, or exists and
            `force` is False.
    """
    folder = resolve(source)
    if not (folder / ORBAX).is_dir():
        raise InputError(f"{folder} has no {ORBAX} folder in it: expected an icejax folder, as convert.hf_to_orbax writes")
    _convert(folder, target, huggingface.write, quantize, force, progress)


def _convert(
    folder: Path,
    target: Path,
    write: Callable[[Path, About, Iterable[tuple[str, np.ndarray]]], None],
    quantize: str | None,
    force: bool,
    progress: Progress | None,
) -> None:
    """Writes `folder` as `target`; `write` writes tensors, whose shapes and dtypes are known, into a folder one by one."""
    if folder.resolve() in Path(os.path.realpath(target)).parents:
        raise InputError(f"{target} is in the source {folder}: choose another place")
    config = read_config(folder)
    shapes = {key: leaf.shape for key, leaf in abstract(config, "float32")[1].items()}
    found = open_tensors(folder, config, shapes, quantize=quantize)
    if whole := [key for key, source in found.sources.items() if source.method is not None and len(source.shape) == 3]:
        raise InputError(f"no folder holds codes of experts in one tensor: leave --quantize to what loads it ({listed(whole)})")
    about, beside = found.about(), companions(folder)
    with claim(target, mark=CONFIG, replace=force) as held:
        _check_target(folder, target)
        held.check_room(sum(huggingface.size(*each) for each in about.values()) + sum(file.stat().st_size for file in beside))
        with held.writing() as made:
            for file in beside:
                shutil.copyfile(file, made / file.name)
            if quantize is not None:
                raw = huggingface.read_json(folder / CONFIG) | {"quantization_config": METHODS[quantize].config()}
                (made / CONFIG).write_text(json.dumps(raw, indent=2))
            write(made, about, _told(found, len(about), progress))


def _told(found: Tensors, count: int, progress: Progress | None) -> Iterator[tuple[str, np.ndarray]]:
    done = 0
    for key, tensor in found.written():
        yield key, tensor
        del tensor  # or it would be there beside the next one
        if progress is not None:
            progress(key, done := done + 1, count)


def _check_target(source: Path, target: Path) -> None:
    """Raises InputError if what stands at `target` is the source, or holds what replacing it would lose."""
    if not target.exists():
        return
    if target.samefile(source):
        raise InputError(f"{target} is the source: choose another place")
    for name in sorted(file.name for file in target.iterdir()):
        if name not in (*COMPANIONS, ORBAX, huggingface.INDEX) and not name.endswith(".safetensors"):
            raise InputError(f"{target} holds more than a checkpoint ({name}): choose another place")
