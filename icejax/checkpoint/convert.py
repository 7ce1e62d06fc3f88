"""Converts a checkpoint folder between the Hugging Face form and icejax's own, bit for bit or with rounding.

`icejax.commands.convert` calls it. Tensors pass one at a time, each in its stored shape and dtype, or as codes if rounded.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from icejax.checkpoint.folder import COMPANIONS, ORBAX, companions, resolve
from icejax.checkpoint.load import Progress, abstract, open_checkpoint
from icejax.checkpoint.quantized.rounding import METHODS
from icejax.checkpoint.readers import huggingface, orbax
from icejax.checkpoint.tensors import Tensors, open_tensors
from icejax.checks.errors import InputError, listed
from icejax.files.atomic_folder import claim

About = Mapping[str, tuple[tuple[int, ...], str]]  # shape and dtype of each tensor, by key
CONFIG = "config.json"  # the file that marks a checkpoint folder


def hf_to_orbax(
    source: str | Path,
    target: Path,
    *,
    quantize: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes the Hugging Face folder (or hub id) `source` as the icejax folder `target`, whole or not at all.

    Tensors are read and written one by one: host memory holds at most two of the largest tensors. Free disk space is checked
    before the first tensor is read.

    Args:
        source: a Hugging Face folder or a hub id.
        target: the folder to write.
        quantize: int8, fp8 or int4: matrices are rounded as by `load_model`, and `target` has the form of compressed-tensors.
            None: all tensors keep their stored bits.
        force: whether an existing checkpoint at `target` is replaced.
        progress: called after every tensor.

    Raises:
        InputError: `source` is not a valid Hugging Face checkpoint or cannot be rounded (experts in one tensor, for example),
            or `target` cannot be written, or exists while `force` is False.
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
    """Writes the icejax folder `source` as the Hugging Face folder `target`, whole or not at all.

    Arguments and memory are the same as in `hf_to_orbax`.

    Raises:
        InputError: `source` is not a valid icejax folder or cannot be rounded, or `target` cannot be written, or exists while
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
    """Writes `folder` as `target`.

    Args:
        write: writes tensors one by one into a folder, from the folder, the shapes and dtypes by key, and the tensors.
    """
    if folder.resolve() in Path(os.path.realpath(target)).parents:
        raise InputError(f"{target} is in the source {folder}: choose another place")
    config = open_checkpoint(folder).config
    shapes = {key: leaf.shape for key, leaf in abstract(config, "float32")[1].items()}
    tensors = open_tensors(folder, config, shapes, quantize=quantize)
    if fused := [key for key, source in tensors.sources.items() if source.method is not None and len(source.shape) == 3]:
        raise InputError(
            f"fused experts cannot be saved quantised: convert without --quantize, and give it when loading ({listed(fused)})"
        )
    about, files = tensors.about(), companions(folder)
    with claim(target, mark=CONFIG, replace=force) as target_claim:
        _check_target(folder, target)
        target_claim.check_room(
            sum(huggingface.size(*entry) for entry in about.values()) + sum(file.stat().st_size for file in files)
        )
        with target_claim.writing() as new_folder:
            for file in files:
                shutil.copyfile(file, new_folder / file.name)
            if quantize is not None:
                rounded = {key: source for key, source in tensors.sources.items() if source.method is not None}
                columns = {key.removesuffix(".weight"): source.shape[-1] for key, source in rounded.items()}
                raw = huggingface.read_json(folder / CONFIG) | {"quantization_config": METHODS[quantize].config(columns)}
                (new_folder / CONFIG).write_text(json.dumps(raw, indent=2))
            write(new_folder, about, _reporting(tensors, len(about), progress))


def _reporting(tensors: Tensors, count: int, progress: Progress | None) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the key and array of each tensor to write, and calls `progress` once the caller has written it."""
    done = 0
    for key, tensor in tensors.written():
        yield key, tensor
        del tensor  # else two tensors are in memory while the next is read
        if progress is not None:
            progress(key, done := done + 1, count)


def _check_target(source: Path, target: Path) -> None:
    """Raises InputError if `target` is the source folder, or holds files that are not a checkpoint's."""
    if not target.exists():
        return
    if target.samefile(source):
        raise InputError(f"{target} is the source: choose another place")
    for name in sorted(file.name for file in target.iterdir()):
        if name not in (*COMPANIONS, ORBAX, huggingface.INDEX) and not name.endswith(".safetensors"):
            raise InputError(f"{target} holds more than a checkpoint ({name}): choose another place")
