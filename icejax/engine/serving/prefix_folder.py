"""The prefix store on the disk: cached prefixes that several prompts share, for the next engine with the same model and sizes.

`prefix_cache` calls it. A prefix is two files: `NAME.arrays` has its arrays, and `NAME.json`, which is written last, describes
them. NAME is a hash of the salt and the tokens, so a prompt finds its prefixes by name, and nothing else is compared but the
tokens behind the last whole block. All files are the user's alone. A prefix that is damaged or gone is computed anew.

    FOLDER/5f0c.../e91a....json     5f0c...: a hash of the model, the cache's options and the sizes of its arrays
    FOLDER/5f0c.../e91a....arrays
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from icejax.checks import json_file
from icejax.checks.errors import InputError
from icejax.checks.numbers import POSITIONS
from icejax.engine.plan import Plan
from icejax.engine.serving.cropped import Cropped
from icejax.engine.serving.prefixes import BLOCK, Entry
from icejax.engine.snapshot.fingerprint import Damaged, damaged
from icejax.engine.snapshot.row_arrays import cache_kinds, empty_cache, pages_out, pool_kinds, saved_extents
from icejax.engine.snapshot.stored_arrays import ArrayFile, ArrayWriter, StoredArray, described_arrays
from icejax.files.private import make_folder, new_file

LOG = logging.getLogger(__name__)
VERSION = 1
LOGITS = "logits"
ABOUT, ARRAYS = ".json", ".arrays"
PART = ".part."  # before the name of a file that is being written
DAY = 24 * 3600  # seconds


@dataclass(frozen=True)
class StoredPrefix:
    """A cached prefix on the disk.

    Attributes:
        path: its files, without their suffix.
        key: the hash of its salt and whole blocks.
        tail: the tokens behind its last whole block.
        length: number of its tokens.
        pages: number of its pages.
        arrays: descriptions of its arrays by name.
    """

    path: Path
    key: bytes
    tail: tuple[int, ...]
    length: int
    pages: int
    arrays: dict[str, StoredArray]


class PrefixFolder:
    """The cached prefixes in a folder, of which an engine reads those that its model and sizes made."""

    def __init__(self, folder: Path, identity: dict[str, Any], plan: Plan, *, most_bytes: int) -> None:
        """Makes the folder, and reads which prefixes it holds.

        Args:
            identity: the fingerprint of the model and its cache.
            plan: the plan of a batch of one row.
            most_bytes: bytes of all files in the folder, of other models too; the least recently used go first.

        Raises:
            InputError: the folder cannot be made or read.
        """
        cache = replace(empty_cache(plan), lengths=None)
        self._kinds, self._treedef = cache_kinds(cache), jax.tree.structure(cache.layers)
        self._plan, self._root, self._most_bytes = plan, folder, most_bytes
        self._logits = ("float32", (1, identity["config.vocab_size"]))
        made_with = json.dumps([identity, asdict(plan.spec), self._kinds, pool_kinds(plan, 1)])
        self._folder = folder / hashlib.sha256(made_with.encode()).hexdigest()[:32]
        self._stored: dict[bytes, list[StoredPrefix]] = {}
        try:
            make_folder(self._folder)
            paths = sorted(self._folder.iterdir())
        except OSError as error:
            raise InputError(f"prefix_dir {folder} cannot be used ({error.strerror}): choose another folder") from None
        for path in paths:
            try:
                if path.suffix == ABOUT:
                    stored = _described(path.with_suffix(""))
                    self._stored.setdefault(stored.key, []).append(stored)
                elif not path.with_suffix(ABOUT).exists() and path.stat().st_mtime < time.time() - DAY:
                    path.unlink()  # its writer was killed
            except (InputError, OSError) as error:
                LOG.warning("%s is no prefix that can be read (%s): it is removed", path, _reason(error))
                _remove(path.with_suffix(""))

    def find(self, tokens: np.ndarray, chain: Sequence[bytes]) -> StoredPrefix | None:
        """Returns the longest prefix of a prompt whose hashes are `chain`."""
        for count in reversed(range(len(chain))):
            stored = [x for x in self._stored.get(chain[count], ()) if x.length <= len(tokens)]
            stored = [x for x in stored if list(x.tail) == tokens[count * BLOCK : x.length].tolist()]
            if stored:
                return max(stored, key=lambda x: x.length)
        return None

    def write(self, entry: Entry, pool: Callable[[], jax.Array | None]) -> Iterator[None]:
        """Writes an entry, unless it is there; stops between two arrays. A disk that is full is no error, and is logged.

        Args:
            pool: returns the pool as it is now.
        """
        key, length = entry.key, entry.length
        tail = tuple(entry.tokens[length // BLOCK * BLOCK :].tolist())
        path = self._folder / hashlib.sha256(key + np.asarray(tail, "<i4").tobytes()).hexdigest()
        if any(path == stored.path for stored in self._stored.get(key, ())):
            return
        part = path.with_name(f"{PART}{path.name}.{os.getpid()}")
        try:
            bits = pool_kinds(self._plan, entry.pages).values()
            if not self._make_room(entry.nbytes + sum(StoredArray(*kind, 0).size for kind in bits)):
                return
            with new_file(part) as file:
                writer = ArrayWriter(file)
                writer.write(LOGITS, entry.logits)
                for name, x in zip(self._kinds, jax.tree.leaves(entry.cache, is_leaf=_is_cropped), strict=True):
                    writer.write(name, x.part)
                    yield
                if entry.table is not None:
                    for (name, count), extent in zip(saved_extents(entry.pages), entry.table, strict=False):
                        writer.write(name, pages_out(pool(), extent, count))
                        yield
            os.replace(part, path.with_suffix(ARRAYS))
            fields = dict(version=VERSION, key=key.hex(), tail=tail, length=length, pages=entry.pages, arrays=writer.described)
            with new_file(part) as file:
                file.write(json.dumps(fields | {"checksum": _checksum(fields)}).encode())
            os.replace(part, path.with_suffix(ABOUT))
            self._stored.setdefault(key, []).append(_described(path))
            LOG.info("a prefix of %d tokens is now in %s", length, self._root)
        except (InputError, OSError) as error:
            LOG.warning("a prefix of %d tokens cannot be stored in %s (%s)", length, self._root, _reason(error))
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    @contextlib.contextmanager
    def open(self, stored: StoredPrefix) -> Iterator[ArrayFile]:
        """Yields the open file of a prefix's arrays, and counts its use.

        Raises:
            InputError: the arrays are not those of this model and these sizes.
            OSError: the file cannot be read.
        """
        path = stored.path.with_suffix(ARRAYS)
        os.utime(stored.path.with_suffix(ABOUT))  # the least recently used go first
        kinds = {name: _cropped(kind, stored.arrays.get(name)) for name, kind in self._kinds.items()}
        with open(path, "rb") as file:
            arrays = ArrayFile(path, file, stored.arrays)
            arrays.expect({LOGITS: self._logits} | kinds | pool_kinds(self._plan, stored.pages))
            yield arrays

    def leaves(self, arrays: ArrayFile) -> Iterator[Cropped]:
        """Yields the arrays of a prefix's layers, in the order of the leaves of `layers`."""
        for name, (_, shape) in self._kinds.items():
            yield Cropped(shape, arrays.read(name))

    def layers(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the layers with these leaves."""
        return jax.tree.unflatten(self._treedef, leaves)

    def forget(self, stored: StoredPrefix, error: InputError | OSError) -> None:
        """Removes a prefix that cannot be read, and logs why."""
        self._stored[stored.key] = [other for other in self._stored[stored.key] if other is not stored]
        _remove(stored.path)
        LOG.warning("a prefix in %s cannot be read (%s): it is computed anew", self._root, _reason(error))

    def _make_room(self, need: int) -> bool:
        """Removes the least recently used prefixes until `need` bytes fit beside the others; False if they cannot."""
        free = shutil.disk_usage(self._folder).free
        if need > min(self._most_bytes, free):
            LOG.warning(
                "a prefix of %d bytes is not stored in %s: prefix_disk is %d bytes, and %d are free",
                *(need, self._root, self._most_bytes, free),
            )
            return False
        stored = sorted((path.stat().st_mtime, path) for path in self._root.glob(f"{'[0-9a-f]' * 32}/{'[0-9a-f]' * 64}.json"))
        used = {path: _file_size(path) + _file_size(path.with_suffix(ARRAYS)) for _, path in stored}
        while sum(used.values()) + need > self._most_bytes:
            _, path = stored.pop(0)
            del used[path]
            _remove(path.with_suffix(""))
        return True


def _described(path: Path) -> StoredPrefix:
    """Returns the description of the prefix at `path`.

    Raises:
        InputError: it is damaged, or of another version.
        OSError: it cannot be read.
    """
    fields = json_file.read(path.with_suffix(ABOUT))
    if fields.pop("checksum", None) != _checksum(fields) or fields.get("version") != VERSION:
        damaged(path, "its description is not as it was saved")
    try:
        key, tail = bytes.fromhex(fields["key"]), tuple(map(int, fields["tail"]))
        length, pages = int(fields["length"]), int(fields["pages"])
    except (KeyError, TypeError, ValueError):
        damaged(path, "its description says no tokens and pages")
    if length % BLOCK != len(tail) or not 0 < length <= POSITIONS or not 0 <= pages <= POSITIONS:
        damaged(path, f"{length} tokens, {len(tail)} behind whole blocks and {pages} pages do not fit")
    return StoredPrefix(path, key, tail, length, pages, described_arrays(path, fields.get("arrays")))


def _cropped(kind: tuple[str, tuple[int, ...]], array: StoredArray | None) -> tuple[str, tuple[int, ...]]:
    """Returns the kind of an array that may be smaller than `kind` along each axis: its own, if it is."""
    dtype, shape = kind
    is_part = array is not None and len(array.shape) == len(shape)
    return (dtype, array.shape) if is_part and all(x <= y for x, y in zip(array.shape, shape, strict=True)) else kind


def _remove(path: Path) -> None:
    """Removes the files of a prefix, its description first."""
    for suffix in (ABOUT, ARRAYS):
        with contextlib.suppress(OSError):
            path.with_suffix(suffix).unlink()


def _file_size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _reason(error: InputError | OSError) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return error.fault if isinstance(error, Damaged) else str(error)


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _is_cropped(x: Any) -> bool:
    return isinstance(x, Cropped)
