"""A GGUF model as a checkpoint folder: config.json and tokenizer files made of its metadata, and the names of its files.

`icejax.checkpoint.folder` makes such a folder, so that what reads folders reads GGUF. It lies in the user's cache directory,
is private, and is made once per file. The weights stay in the GGUF file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import shutil
import time
from pathlib import Path

from icejax.checkpoint.folder import POINTER, gguf_folders
from icejax.checkpoint.gguf.config import FREQUENCIES, LONG, SHORT, raw_config
from icejax.checkpoint.gguf.numbers import read_numbers, read_stored
from icejax.checkpoint.gguf.parts import PART, Model, part_names, read_model
from icejax.checks.errors import InputError, input_error_from, quoted
from icejax.checks.json_file import read
from icejax.files import private
from icejax.files.atomic_folder import claim
from icejax.models.registry import family

LOG = logging.getLogger(__name__)
IN_CONFIG = (FREQUENCIES, LONG, SHORT)  # tensors whose numbers the config holds
MOST_IN_CONFIG = 2**16  # bytes of such a tensor; `raw_config` refuses longer ones
ADVICE = "XDG_CACHE_HOME must name a directory in which files can be made"
SECONDS = 30  # that another process may take to make the same folder


def folder_of(file: Path) -> Path:
    """Returns the checkpoint folder of a GGUF file or set, after making it where it is missing.

    Raises:
        InputError: the file is not sound or not supported, or the cache directory cannot be written.
    """
    file = file.absolute()
    model = read_model(file)
    folder = gguf_folders() / f"{_stem(file.name)}-{_checksum(model)}"
    _check_owner(folder)
    if not _is_whole(folder):
        _make(folder, model)
        return folder
    for line in read(folder / POINTER)["warnings"]:  # the making logged them, perhaps long ago
        LOG.warning("%s", line)
    return folder


class _Warnings(logging.Handler):
    """Collects the warnings that are logged while a folder is made."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _check_owner(folder: Path) -> None:
    """Raises InputError if another user can put files into a folder of a GGUF file, or made it."""
    for path in (folder.parent, folder):
        path = Path(os.path.realpath(path))
        if path.exists() and (danger := private.danger(path, "whose files would stand for the model's")) is not None:
            raise InputError(f"{path} {danger}: let XDG_CACHE_HOME name a directory of your own")


def _is_whole(folder: Path) -> bool:
    """Says whether a folder holds all files that were made for it."""
    try:
        about = read(folder / POINTER)
    except (FileNotFoundError, InputError):
        return False
    names = about.get("made")
    if not isinstance(names, list) or not isinstance(about.get("warnings"), list):
        return False
    return all(isinstance(name, str) and os.path.isfile(folder / name) for name in names)


def pointed_model(folder: Path) -> Model:
    """Returns the model of a folder that `folder_of` made; InputError if its GGUF file is missing, not sound or another now."""
    with input_error_from(f"{folder} cannot be read"):
        _check_owner(folder)
        name = read(folder / POINTER).get("file")
        if not isinstance(name, str) or not os.path.isabs(name) or not os.path.isfile(file := Path(name)):
            raise InputError(f"{folder}: the GGUF file {quoted(name)} is missing: give the file where it is now")
        model, checksum = _read(file, _versions(file))
    if not folder.resolve().name.endswith(f"-{checksum}"):
        raise InputError(
            f"{folder} was made of another file than {file} is now, or by another version of icejax: give the file again"
        )
    return model


@functools.lru_cache(maxsize=1)
def _read(file: Path, versions: tuple[tuple[int, ...], ...]) -> tuple[Model, str]:
    """Returns a file's metadata without the vocabulary, and its checksum: a load asks several times."""
    model = read_model(file)
    return model._replace(values={}), _checksum(model)


def _versions(file: Path) -> tuple[tuple[int, ...], ...]:
    """Returns numbers of each file of a model that change when the file is written or replaced."""
    parts = [file.parent / name for name in part_names(file.name)]
    states = [part.stat() for part in parts if part.exists()]
    return tuple((state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for state in states)


def _make(folder: Path, model: Model) -> None:
    from icejax.checkpoint.gguf.tokenizer_files import tokenizer_files  # imports the tokenizers package

    source, warnings, log = model.files[0].name, _Warnings(), logging.getLogger(__package__)
    log.addHandler(warnings)
    try:
        config = raw_config(model.values, model.tensors, read=lambda name: read_numbers(model.tensors[name]), source=source)
        files = {"config.json": json.dumps(config, indent=2)} | tokenizer_files(model.values)
    finally:
        log.removeHandler(warnings)
    try:
        family(config).read_config(config)
    except InputError as error:
        raise InputError(f"{model.files[0]}: its metadata make a config that is not read: {error}") from None
    about = {"file": str(model.files[0]), "made": sorted(files), "warnings": warnings.lines}
    files[POINTER] = json.dumps(about)
    try:
        private.make_folder(folder.parent)
    except OSError as error:
        raise InputError(f"{folder.parent} cannot be made ({error.strerror}): {ADVICE}") from None
    lock, stop = folder.parent / f".{folder.name}.lock", time.monotonic() + SECONDS
    while not _is_whole(folder):  # another process may make it at the same time
        try:
            if not lock.exists() and not (folder / POINTER).exists():
                shutil.rmtree(folder, ignore_errors=True)  # what somebody left of it, which `claim` would refuse
            with claim(folder, mark=POINTER) as folder_claim:
                if _is_whole(folder):
                    return
                with folder_claim.writing(private=True) as new_folder:
                    for name, text in files.items():
                        (new_folder / name).parent.mkdir(exist_ok=True)
                        (new_folder / name).write_text(text, encoding="utf-8")
        except InputError as error:
            is_awaited = lock.exists() and time.monotonic() < stop  # asked first: the other may finish between the questions
            if not is_awaited and not _is_whole(folder):
                raise InputError(f"{error}; {ADVICE}") from None
            time.sleep(0.05)


def _stem(name: str) -> str:
    """Returns the beginning of a folder's name: the letters, digits, dots and dashes of the file's."""
    match = PART.fullmatch(name)
    stem = match[1] if match is not None else re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE)
    return re.sub(r"[^\w.-]+", "_", stem).strip(".").encode()[:80].decode(errors="ignore") or "model"


def _checksum(model: Model) -> str:
    """Returns a checksum of all that a folder is made of: headers, places of files, tensors of the config, and this code."""
    digest = hashlib.sha256()
    for code in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(code.read_bytes())
    for file, size in zip(model.files, model.header_sizes, strict=True):
        digest.update(str(file).encode("utf-8", "surrogateescape"))
        with file.open("rb") as stream:
            digest.update(stream.read(size))
    for name in IN_CONFIG:
        if name in model.tensors and model.tensors[name].size <= MOST_IN_CONFIG:
            digest.update(read_stored(model.tensors[name]).tobytes())
    return digest.hexdigest()[:16]
