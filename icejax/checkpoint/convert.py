"""Converts a checkpoint folder between the Hugging Face form and icejax's own, bit for bit or with rounding.

`icejax.commands.convert` calls it. Tensors pass one at a time, each in its stored shape and dtype, or as codes if rounded; on a
mesh their rows pass, those of each device in turn.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icejax.checkpoint.folder import COMPANIONS, ORBAX, TEMPLATES, companions, resolve
from icejax.checkpoint.load import Progress, abstract, open_checkpoint
from icejax.checkpoint.pieces import Piece, largest, pieces
from icejax.checkpoint.quantized.rounding import METHODS
from icejax.checkpoint.readers import huggingface, orbax
from icejax.checkpoint.tensors import Tensors, open_tensors
from icejax.checks.errors import InputError, input_error_from, listed, quoted
from icejax.checks.numbers import is_unicode
from icejax.files.atomic_folder import claim, current_folder
from icejax.models.hf.hf_config import ROTARY_TABLES
from icejax.runtime.mesh import Mesh, check_one_process, read_mesh

LOG = logging.getLogger(__name__)
CONFIG = "config.json"  # the file that marks a checkpoint folder


@dataclass(frozen=True)
class Conversion:
    """The source and the form of a conversion.

    Attributes:
        folder: the source.
        target: the folder that is written.
        quantize: how matrices are rounded; None: not at all.
        force: whether an existing checkpoint at `target` is replaced.
        mesh: the devices that share the rows of every tensor; None: one device.
        progress: called after every tensor.
    """

    folder: Path
    target: Path
    quantize: str | None
    force: bool
    mesh: Mesh | None
    progress: Progress | None


def hf_to_orbax(
    source: str | Path,
    target: Path,
    *,
    quantize: str | None = None,
    force: bool = False,
    mesh: str | int | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes the Hugging Face folder (or hub id) `source` as the icejax folder `target`, whole or not at all.

    Tensors are read and written one by one: host memory holds at most two of the largest tensors, on a mesh two of a device's
    largest shares; tensors that cannot be read in boxes are read whole. Free disk space is checked first.

    Args:
        source: a Hugging Face folder or a hub id.
        target: the folder to write.
        quantize: int8, fp8 or int4: matrices are rounded as by `load_model`, and `target` has the form of compressed-tensors.
            None: all tensors keep their stored bits.
        force: whether an existing checkpoint at `target` is replaced.
        mesh: `heads=N`, or N: the devices that each read, round and write a part of every tensor's rows. None: one device. The
            tensors that are written are the same.
        progress: called after every tensor.

    Raises:
        InputError: `source` is not a valid Hugging Face checkpoint or cannot be rounded (experts in one tensor, for example),
            or `target` cannot be written, or exists while `force` is False; JAX has fewer devices, or several processes.
    """
    folder, over = resolve(source), _mesh(mesh)
    if (folder / ORBAX).is_dir():
        raise InputError(f"{folder} is an icejax folder already: expected a Hugging Face folder")

    def write(part: Path, about: orbax.About, parts: Iterable[Piece]) -> None:
        orbax.save(part / ORBAX, about, parts, most_bytes=largest(about, over))

    _convert(Conversion(folder, target, quantize, force, over, progress), write)


def orbax_to_hf(
    source: str | Path,
    target: Path,
    *,
    quantize: str | None = None,
    force: bool = False,
    mesh: str | int | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes the icejax folder `source` as the Hugging Face folder `target`, whole or not at all.

    Arguments and memory are the same as in `hf_to_orbax`.

    Raises:
        InputError: `source` is not a valid icejax folder or cannot be rounded, or `target` cannot be written, or exists while
            `force` is False; JAX has fewer devices, or several processes.
    """
    folder = resolve(source)
    if not (folder / ORBAX).is_dir():
        raise InputError(f"{folder} has no {ORBAX} folder in it: expected an icejax folder, as convert.hf_to_orbax writes")
    _convert(Conversion(folder, target, quantize, force, _mesh(mesh), progress), huggingface.write)


def _mesh(mesh: str | int | None) -> Mesh | None:
    """Returns a mesh; InputError if several processes share its devices."""
    over = read_mesh(mesh)
    check_one_process(over, "a conversion")
    return over


def _convert(task: Conversion, write: Callable[[Path, orbax.About, Iterable[Piece]], None]) -> None:
    """Writes a folder as another one.

    Args:
        write: writes tensors piece by piece into a folder, from the folder, the shapes and dtypes by key, and the pieces.
    """
    folder, target = task.folder, task.target
    if not is_unicode(str(target)):
        raise InputError(f"{quoted(str(target))} is no UTF-8 text, which libraries need that write there: choose another name")
    if os.path.realpath(current_folder(target)) == os.path.realpath(folder):
        raise InputError(f"{target} is the source: choose another place")
    if folder.resolve() in Path(os.path.realpath(target)).parents:
        raise InputError(f"{target} is in the source {folder}: choose another place")
    config = open_checkpoint(folder).config
    shapes = {key: leaf.shape for key, leaf in abstract(config, "float32")[1].items()}
    tensors = open_tensors(folder, config, shapes, quantize=task.quantize)
    if fused := [key for key, source in tensors.sources.items() if source.method is not None and len(source.shape) == 3]:
        raise InputError(
            f"fused experts cannot be saved quantised: convert without --quantize, and give it when loading ({listed(fused)})"
        )
    if lost := [key for key in tensors.skipped if not re.fullmatch(ROTARY_TABLES, key)]:
        LOG.warning("%s: %d tensors that icejax does not use are not copied: %s", folder, len(lost), listed(lost))
    about, files = tensors.about(), companions(folder)
    with claim(target, mark=CONFIG, replace=task.force) as target_claim:
        _check_target(target)
        target_claim.check_room(
            sum(huggingface.size(*entry) for entry in about.values()) + sum(file.stat().st_size for file in files)
        )
        with target_claim.writing() as new_folder:
            for file in files:
                copy = new_folder / file.relative_to(folder)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
            if task.quantize is not None:
                (new_folder / CONFIG).write_text(json.dumps(_quantised_config(folder, tensors, task.quantize), indent=2))
            write(new_folder, about, _reporting(pieces(tensors, task.mesh), len(about), task.progress))


def _quantised_config(folder: Path, tensors: Tensors, quantize: str) -> dict[str, Any]:
    """Returns the raw config.json of a folder with matrices that are rounded."""
    rounded = {key: source for key, source in tensors.sources.items() if source.method is not None}
    columns = {key.removesuffix(".weight"): source.shape[-1] for key, source in rounded.items()}
    return huggingface.read_json(folder / CONFIG) | {"quantization_config": METHODS[quantize].config(columns)}


def _reporting(parts: Iterable[Piece], count: int, progress: Progress | None) -> Iterator[Piece]:
    """Yields the pieces to write, and calls `progress` once the caller has written the first one of a tensor."""
    done: set[str] = set()
    for piece in parts:
        key = piece.key
        yield piece
        del piece  # else two pieces are in memory while the next is read
        if progress is not None and key not in done:
            done.add(key)
            progress(key, len(done), count)


def _check_target(target: Path) -> None:
    """Raises InputError if `target` holds files that are not a checkpoint's, or cannot be read."""
    if not target.exists():
        return
    with input_error_from(f"{target} cannot be read"):
        names = sorted(os.listdir(target))
    for name in names:
        if name not in (*COMPANIONS, TEMPLATES, ORBAX, huggingface.INDEX) and not name.endswith(".safetensors"):
            raise InputError(f"{target} holds more than a checkpoint ({name}): choose another place")
