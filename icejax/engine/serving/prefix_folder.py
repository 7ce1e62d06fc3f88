"""The prefix store on the disk: cached prefixes that several prompts share, for the next engine with the same model and sizes.

`prefix_cache` calls it. A prefix is two files: `NAME.arrays` has its arrays, and `NAME.json`, which is written last, describes
them. NAME is a hash of the salt and the tokens, so that no token is in a file. An engine reads the descriptions when it starts.
All files are the user's alone. A prefix that is damaged or gone is computed again.

    FOLDER/5f0c.../e91a....json     5f0c...: a hash of the model, the cache's options and the sizes of its arrays
    FOLDER/5f0c.../e91a....arrays
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from icejax.cache.pool.host_pool import Pool
from icejax.cache.shares import saved_spec
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
ABOUT_BYTES = 2**16  # of a description, or somewhat more
DAY = 24 * 3600  # seconds
RESERVE = 2**30  # bytes of the disk that stay free
OWN_NAME = re.compile(r"[0-9a-f]{64}\.(json|arrays)|\.part\.[0-9a-f]+")  # of files that may be removed


@dataclass(frozen=True)
class StoredPrefix:
    """A cached prefix on the disk.

    Attributes:
        path: its files, without their suffix.
        key: the hash of its salt and whole blocks.
        length: number of its tokens.
        pages: number of its pages.
        arrays: descriptions of its arrays by name.
    """

    path: Path
    key: bytes
    length: int
    pages: int
    arrays: dict[str, StoredArray]


class PrefixFolder:
    """The cached prefixes in a folder; an engine reads the part that its own model and sizes made."""

    def __init__(self, folder: Path, identity: dict[str, Any], plan: Plan, *, most_bytes: int) -> None:
        """Makes the folder, and reads which prefixes it holds.

        Args:
            identity: what the caches are made with: the fingerprint of the model and its cache.
            plan: the plan of a batch of one row.
            most_bytes: most bytes of all files in the folder, of other models too; the least recently used go first.

        Raises:
            InputError: the folder cannot be made or read, or others may read it.
        """
        cache = replace(empty_cache(plan), lengths=None)
        self._kinds, self._treedef = cache_kinds(cache), jax.tree.structure(cache.layers)
        self._plan, self._root, self._most_bytes = plan, folder.absolute(), most_bytes
        self._logits = ("float32", (1, identity["config.vocab_size"]))
        made_with = json.dumps([VERSION, identity, asdict(saved_spec(plan.spec, plan.mesh)), self._kinds, pool_kinds(plan, 1)])
        self._folder = self._root / hashlib.sha256(made_with.encode()).hexdigest()[:32]
        self._stored: dict[bytes, list[StoredPrefix]] = {}
        try:
            make_folder(self._folder)
            status, names = self._folder.lstat(), sorted(os.listdir(self._folder))  # everybody may read a link
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise InputError(f"others may read or write {self._folder}: remove it, or choose another prefix_dir")
            self._make_room(0)
        except OSError as error:
            raise InputError(f"prefix_dir {folder} cannot be used ({error.strerror}): choose another folder") from None
        for path in (self._folder / name for name in names if OWN_NAME.fullmatch(name) and name.endswith(ABOUT)):
            try:
                self._remember(_described(path.with_suffix("")))
            except (InputError, OSError) as error:
                self._drop(path.with_suffix(""), error)

    def find(self, tokens: np.ndarray, hashes: Sequence[bytes]) -> StoredPrefix | None:
        """Returns the longest prefix of a prompt whose hashes are `hashes`."""
        for count in reversed(range(len(hashes))):
            stored = [x for x in self._stored.get(hashes[count], ()) if x.length <= len(tokens)]
            stored = [x for x in stored if x.path.name == _name(x.key, tokens[count * BLOCK : x.length])]
            if stored:
                return max(stored, key=lambda x: x.length)
        return None

    def write(self, entry: Entry, pool: Callable[[], Pool | None]) -> Iterator[None]:
        """Writes an entry, unless it is there; stops between two arrays. An error of the disk is logged.

        Args:
            pool: returns the pool as it is now.
        """
        path = self._path(entry)
        part = path.with_name(f".part.{secrets.token_hex(16)}")
        try:
            if path.with_suffix(ABOUT).exists():  # another engine may have written it
                os.utime(path.with_suffix(ABOUT))
                self._remember(_described(path))
                return
            make_folder(self._folder)
            of_pages = sum(StoredArray(*kind, 0).size for kind in pool_kinds(self._plan, entry.pages).values())
            if not self._make_room(entry.nbytes + of_pages + ABOUT_BYTES):
                return
            with new_file(part) as file:
                writer = ArrayWriter(file)
                writer.write(LOGITS, entry.logits)
                for name, x in zip(self._kinds, jax.tree.leaves(entry.cache, is_leaf=_is_cropped), strict=True):
                    writer.write(name, x.part)
                    yield
                if entry.table is not None:
                    for (name, count), extent in zip(saved_extents(entry.pages), entry.table, strict=False):
                        for piece, pages in pages_out(pool(), extent, name, count, plan=self._plan):
                            writer.write(piece, pages)
                            yield
            os.replace(part, path.with_suffix(ARRAYS))
            fields = dict(version=VERSION, key=entry.key.hex(), length=entry.length, pages=entry.pages, arrays=writer.described)
            with new_file(part) as file:
                file.write(json.dumps(fields | {"checksum": _checksum(fields)}).encode())
            os.replace(part, path.with_suffix(ABOUT))
            self._remember(_described(path))
            LOG.info("a prefix of %d tokens is now in %s", entry.length, self._root)
        except (InputError, OSError) as error:
            LOG.warning("a prefix of %d tokens cannot be stored in %s (%s)", entry.length, self._root, _reason(error))
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def touch(self, entry: Entry) -> None:
        """Counts a use of an entry that is in memory, so that its files do not look like the least recently used."""
        with contextlib.suppress(OSError):
            os.utime(self._path(entry).with_suffix(ABOUT))

    @contextlib.contextmanager
    def open(self, stored: StoredPrefix) -> Iterator[ArrayFile]:
        """Yields the open file of a prefix's arrays, and counts its use.

        Raises:
            InputError: the arrays are damaged, or not those of this model and these sizes.
            OSError: the file cannot be read.
        """
        if _described(stored.path) != stored:
            raise OSError(errno.ESTALE, "another engine has written it again")
        with contextlib.suppress(OSError):  # a folder may be there to be read only
            os.utime(stored.path.with_suffix(ABOUT))
        kinds = {name: _cropped(kind, stored.arrays.get(name)) for name, kind in self._kinds.items()}
        with open(stored.path.with_suffix(ARRAYS), "rb") as file:
            arrays = ArrayFile(stored.path, file, stored.arrays)
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
        """Looks for a prefix no more that cannot be read, and logs why."""
        self._stored[stored.key].remove(stored)
        self._drop(stored.path, error)

    def _path(self, entry: Entry) -> Path:
        return self._folder / _name(entry.key, entry.tokens[entry.length // BLOCK * BLOCK :])

    def _drop(self, path: Path, error: InputError | OSError) -> None:
        """Logs why a prefix cannot be read, and removes it if it is damaged."""
        if isinstance(error, Damaged | FileNotFoundError):
            _remove(path)
        LOG.warning("a prefix in %s cannot be read (%s): it is computed again", self._root, _reason(error))

    def _remember(self, stored: StoredPrefix) -> None:
        others = [other for other in self._stored.get(stored.key, ()) if other.path != stored.path]
        self._stored[stored.key] = [*others, stored]

    def _make_room(self, need: int) -> bool:
        """Removes the least recently used prefixes until `need` bytes fit beside the others; False if they cannot.

        Files that a killed writer left go too, after a day.
        """
        files = {}
        for path in self._own_files():
            with contextlib.suppress(OSError):  # another engine may have removed it
                if not path.with_suffix(ABOUT).exists() and path.stat().st_mtime < time.time() - DAY:
                    path.unlink()
                elif path.is_file():
                    files[path] = path.stat()
        used = sum(status.st_size for status in files.values())
        most_bytes = min(self._most_bytes, used + max(shutil.disk_usage(self._root).free - RESERVE, 0))
        if need > most_bytes:
            LOG.warning("a prefix of %d bytes is not stored in %s: prefix_disk leaves %d bytes", need, self._root, most_bytes)
            return False
        for path in sorted((path for path in files if path.suffix == ABOUT), key=lambda path: files[path].st_mtime):
            if used + need <= most_bytes:
                break
            _remove(path.with_suffix(""))
            used -= sum(files[x].st_size for x in (path, path.with_suffix(ARRAYS)) if x in files and not x.exists())
        return used + need <= most_bytes

    def _own_files(self) -> Iterator[Path]:
        """Yields the files of all engines; folders of other programs may have such names, and links lead anywhere."""
        for folder in self._root.glob("[0-9a-f]" * 32):
            with contextlib.suppress(OSError):  # another engine may have removed it
                if (status := folder.lstat()).st_uid == os.getuid() and stat.S_ISDIR(status.st_mode):
                    yield from (path for path in sorted(folder.iterdir()) if OWN_NAME.fullmatch(path.name))


def _described(path: Path) -> StoredPrefix:
    """Returns the description of the prefix at `path`.

    Raises:
        InputError: it is damaged, or of another version.
        OSError: it cannot be read.
    """
    about = path.with_suffix(ABOUT)
    if not about.is_file() and about.exists():
        damaged(path, "its description is no file")  # to read a pipe could take for ever
    with open(about, "rb") as file:
        text = file.read(json_file.MOST_BYTES)
    try:
        fields = json_file.parse(text.decode(), source=str(about))
    except (InputError, UnicodeDecodeError):
        damaged(path, "its description is no JSON")
    if fields.pop("checksum", None) != _checksum(fields) or fields.get("version") != VERSION:
        damaged(path, "its description is not as it was saved")
    try:
        key, length, pages = bytes.fromhex(fields["key"]), int(fields["length"]), int(fields["pages"])
    except (KeyError, OverflowError, TypeError, ValueError):
        damaged(path, "its description says no tokens and pages")
    if not 0 < length <= POSITIONS or not 0 <= pages <= POSITIONS:
        damaged(path, f"{length} tokens and {pages} pages cannot be")
    return StoredPrefix(path, key, length, pages, described_arrays(path, fields.get("arrays")))


def _name(key: bytes, tail: np.ndarray) -> str:
    """Returns the name of the prefix of these whole blocks and the tokens behind them."""
    return hashlib.sha256(key + np.ascontiguousarray(tail, "<i4").tobytes()).hexdigest()


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


def _reason(error: InputError | OSError) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return error.fault if isinstance(error, Damaged) else str(error)


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _is_cropped(x: Any) -> bool:
    return isinstance(x, Cropped)
