"""A folder that is there whole or not at all: who may write it, whether it fits, and how it takes its place.

Beside a folder NAME three hidden names are this module's own: `.NAME.part` is on its way to NAME, `.NAME.old` is a whole
NAME on its way out, and `.NAME.lock` is held by the one process that may write.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from icejax.checks.errors import InputError, quoted
from icejax.files.locks import locked
from icejax.files.unfinished import unfinished

OWN = re.compile(r"\.(.+)\.(part|old|lock)")
# How Orbax and safetensors name the system's error inside their own.
SYSTEM_ERROR = re.compile(r"os[ _]error\D*(\d+)")


def as_path(path: str | os.PathLike) -> Path:
    """Returns the path of a folder; InputError for what is none."""
    if not isinstance(path, str | os.PathLike) or "\0" in str(path):
        raise InputError(f"the path of a folder must be a text or a path, got {quoted(path)}")
    return Path(path)


def current_folder(path: Path) -> Path:
    """Returns where the folder `path` is: there, or beside it if its writer was killed while the two changed places."""
    target = Path(os.path.realpath(path))
    old = _beside(target, "old")
    return old if os.path.isdir(old) and not os.path.lexists(target) else path


def marked_folders(folder: Path, *, mark: str) -> dict[str, Path]:
    """Returns the folders in `folder` that hold the file `mark`, by name; OSError if it cannot be read."""
    folders = {}
    for name in os.listdir(folder):
        own = OWN.fullmatch(name)
        path = folder / (own[1] if own is not None and own[2] == "old" else name)
        if not OWN.fullmatch(path.name) and os.path.exists(current_folder(path) / mark):
            folders[path.name] = path
    return dict(sorted(folders.items()))


@dataclass(frozen=True)
class Claim:
    """A folder that nobody else may write while the claim lasts.

    Attributes:
        path: the folder, as it was asked for.
        mark: the file by which a folder of this kind is known.
    """

    path: Path
    mark: str

    @property
    def _names(self) -> tuple[Path, Path, Path]:
        """Where the folder, its next and its last version are, links followed."""
        target = Path(os.path.realpath(self.path))
        return target, _beside(target, "part"), _beside(target, "old")

    def check_room(self, need: int) -> None:
        """Raises InputError if the disk has less than `need` bytes free."""
        with _told(self.path, "choose another place"):
            free = shutil.disk_usage(self._names[0].parent).free
        if need > free:
            raise InputError(
                f"{self.path} needs {need / 2**30:.3g} GiB and {free / 2**30:.3g} GiB is free on its disk: "
                "make room, or choose another place"
            )

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        """Yields an empty folder that takes the place of `path`, on the disk to its last byte, when the block ends well.

        Raises:
            InputError: the disk is full or broken; what was there before is as it was.
        """
        target, part, old = self._names
        with _told(self.path, "what was there before is kept"), unfinished(part):
            try:
                part.mkdir()
                yield part
                _sync(part)
                if target.exists():
                    os.rename(target, old)
                os.rename(part, target)
            except BaseException:
                self._settle()
                raise
            with contextlib.suppress(OSError):  # the new one is in its place; the next writer removes what is left
                _sync_one(target.parent)
                self._settle()

    def remove(self) -> None:
        """Removes the folder, which is whole until it is gone; InputError if the system forbids it."""
        target, part, _ = self._names
        with _told(self.path, "remove it by hand"), unfinished(part):
            os.rename(target, part)
            shutil.rmtree(part)

    def _settle(self) -> None:
        """Puts a folder that was on its way out back if no other took its place, and removes what writers left."""
        target, part, old = self._names
        shutil.rmtree(part, ignore_errors=True)
        if (old / self.mark).exists():
            if os.path.lexists(target):
                os.rename(old, part)  # so that what is called old is whole, always
                shutil.rmtree(part, ignore_errors=True)
            else:
                os.rename(old, target)


@contextlib.contextmanager
def claim(path: Path, *, mark: str, replace: bool = True) -> Iterator[Claim]:
    """Yields the claim of this process on the folder `path`, and clears away what a killed writer left beside it.

    Args:
        mark: the file by which a folder of this kind is known.
        replace: whether it may be there already.

    Raises:
        InputError: another writer has it, it cannot be written, it is there and must not be, or it is another kind of folder.
    """
    held = Claim(path, mark)
    with contextlib.ExitStack() as stack:
        with _told(path, "choose another place"):
            target, part, _ = held._names
            if not target.name or OWN.fullmatch(target.name):
                raise InputError(f"{path} cannot be the name of a folder that is kept: choose another place")
            target.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(path, _beside(target, "lock")))
            held._settle()
            if os.path.lexists(target) and not (target / mark).exists():
                kind = "checkpoint" if mark == "config.json" else mark.removesuffix(".json")
                raise InputError(f"{path} exists and is no {kind} folder: choose another place")
            if target.exists() and not replace:
                raise InputError(f"{path} exists: choose another place, or give --force to replace it")
            part.mkdir()  # a folder can be made there, not only the file of the lock be written
            part.rmdir()
        yield held


@contextlib.contextmanager
def _told(path: Path, then: str) -> Iterator[None]:
    """Tells an error of the system in one line that ends with `then`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        number = SYSTEM_ERROR.search(str(error))
        if not isinstance(error, OSError) and number is None:
            raise
        reason = os.strerror(int(number[1])) if number is not None else error.strerror or str(error)
        if isinstance(error, OSError) and _elsewhere(error, path):
            reason += f": {error.filename}"
        raise InputError(f"{path} cannot be written ({reason}): {then}") from None


def _elsewhere(error: OSError, path: Path) -> bool:
    """Says whether the error is about a file that is neither `path` nor beside or in it: one that was to be read."""
    if not isinstance(error.filename, str) or error.filename2 is not None:
        return False
    return Path(os.path.realpath(path)).parent not in Path(os.path.realpath(error.filename)).parents


def _beside(target: Path, what: str) -> Path:
    return target.parent / f".{target.name}.{what}"


def _sync(folder: Path) -> None:
    """Has all of `folder` written to the disk."""
    for where, _, names in os.walk(folder):
        for name in names:
            _sync_one(os.path.join(where, name))
        _sync_one(where)


def _sync_one(path: str | Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
