"""A folder that is on the disk whole or not at all: a lock for its writer, a check of free space, and renames into place.

`icejax.checkpoint`, `icejax.session` and `icejax.commands` call it. Beside a folder NAME, three hidden names belong to this
module: `.NAME.part` is the next version, which is being written; `.NAME.old` is the whole previous version, until the next one
is in place; and `.NAME.lock` is the lock file of the one process that may write.

Example, a folder `chat` is replaced in four steps:
    1. `.chat.part` is written and synced.
    2. `chat` is renamed to `.chat.old`. A writer killed now leaves no `chat`, and `current_folder` returns `.chat.old`.
    3. `.chat.part` is renamed to `chat`.
    4. `.chat.old` is renamed to `.chat.part`, and removed.

A private folder has mode 0700 from its first moment, and its files have 0600 before it takes its place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from icejax.checks.errors import InputError, quoted
from icejax.files.locks import locked
from icejax.files.unfinished import unfinished

LOG = logging.getLogger(__name__)
OWN = re.compile(r"\.(.+)\.(part|old|lock)")  # the hidden names of this module
# The number of the system's error in the messages of Orbax and safetensors.
SYSTEM_ERROR = re.compile(r"os[ _]error\D*(\d+)")


def as_path(path: str | os.PathLike) -> Path:
    """Returns `path` as a Path; InputError if it is neither text nor a path, or has a zero byte."""
    if not isinstance(path, str | os.PathLike) or "\0" in str(path):
        raise InputError(f"the path of a folder must be a text or a path, got {quoted(path)}")
    return Path(path)


def as_claim(value: object) -> Claim:
    """Returns `value` if it is a claim on a folder; InputError for anything else, such as the folder's path."""
    if not isinstance(value, Claim):
        raise InputError(f"save_to must be a claim on a folder, from icejax.files.atomic_folder.claim, got {quoted(value)}")
    return value


def current_folder(path: Path) -> Path:
    """Returns `path`, or its .old name if a writer was killed between the two renames, so that only .old exists."""
    target = Path(os.path.realpath(path))
    old = _beside(target, "old")
    return old if os.path.isdir(old) and not os.path.lexists(target) else path


def marked_folders(folder: Path, *, mark: str) -> dict[str, Path]:
    """Returns the folders in `folder` that hold the file `mark`, by name.

    Raises:
        OSError: `folder` cannot be read.
    """
    folders = {}
    for name in os.listdir(folder):
        hidden = OWN.fullmatch(name)
        path = folder / (hidden[1] if hidden is not None and hidden[2] == "old" else name)
        if not OWN.fullmatch(path.name) and os.path.exists(current_folder(path) / mark):
            folders[path.name] = path
    return dict(sorted(folders.items()))


@dataclass(frozen=True)
class Claim:
    """A folder that no other process may write while the claim lasts.

    Attributes:
        path: the folder, as the caller named it.
        mark: the file that marks a folder of this kind, such as config.json.
    """

    path: Path
    mark: str

    @property
    def _names(self) -> tuple[Path, Path, Path]:
        """Paths of the folder, its next version and its previous version, with links resolved."""
        target = Path(os.path.realpath(self.path))
        return target, _beside(target, "part"), _beside(target, "old")

    def check_room(self, need: int) -> None:
        """Raises InputError if the disk has less than `need` bytes free."""
        with _system_errors_told(self.path, "choose another place"):
            free = shutil.disk_usage(self._names[0].parent).free
        if need > free:
            raise InputError(
                f"{self.path} needs {need / 2**30:.3g} GiB and {free / 2**30:.3g} GiB is free on its disk: "
                "make room, or choose another place"
            )

    @contextlib.contextmanager
    def writing(self, *, private: bool = False) -> Iterator[Path]:
        """Yields an empty folder, which replaces `path` when the block ends without an error; its bytes are then on the disk.

        Args:
            private: whether only the user may read the folder, whatever the umask; else the umask decides.

        Raises:
            InputError: the disk is full or broken; the previous folder stays.
        """
        target, part, old = self._names
        with _system_errors_told(self.path, "what was there before is kept"), unfinished(part):
            try:
                part.mkdir(mode=0o700 if private else 0o777)
                if private:
                    _set_mode(part, 0o700)  # the umask may take the user's own rights away
                    if part.stat().st_mode & 0o077:
                        LOG.warning("%s: its disk keeps no permissions, others may read it: choose another place", self.path)
                yield part
                _spread_mode(part)
                _sync(part)
                if target.exists():
                    os.rename(target, old)
                os.rename(part, target)
            except BaseException:
                self._settle()
                raise
            with contextlib.suppress(OSError):  # the new version is in place; the next writer removes leftovers
                _sync_one(target.parent)
                self._settle()

    def remove(self) -> None:
        """Removes the folder; a rename comes first, so nobody finds half of it. InputError if the system forbids it."""
        target, part, _ = self._names
        with _system_errors_told(self.path, "remove it by hand"), unfinished(part):
            os.rename(target, part)
            shutil.rmtree(part)

    def _settle(self) -> None:
        """Removes leftovers of writers, and moves a previous version back if no new version replaced it."""
        target, part, old = self._names
        shutil.rmtree(part, ignore_errors=True)
        if (old / self.mark).exists():
            if os.path.lexists(target):
                os.rename(old, part)  # renamed before it is removed: .old is always whole
                shutil.rmtree(part, ignore_errors=True)
            else:
                os.rename(old, target)


@contextlib.contextmanager
def claim(path: Path, *, mark: str, replace: bool = True) -> Iterator[Claim]:
    """Yields this process's claim on the folder `path`, after removing what a killed writer left beside it.

    Args:
        mark: the file that marks a folder of this kind.
        replace: whether the folder may exist already.

    Raises:
        InputError: another writer has the folder, it cannot be written, it exists and `replace` is False, or it is a folder of
            another kind.
    """
    folder_claim = Claim(path, mark)
    with contextlib.ExitStack() as stack:
        with _system_errors_told(path, "choose another place"):
            target, part, _ = folder_claim._names
            if not target.name or OWN.fullmatch(target.name):
                raise InputError(f"{path} cannot be the name of a folder that is kept: choose another place")
            target.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(path, _beside(target, "lock")))
            folder_claim._settle()
            if os.path.lexists(target) and not (target / mark).exists():
                kind = "checkpoint" if mark == "config.json" else mark.removesuffix(".json")
                raise InputError(f"{path} exists and is no {kind} folder: choose another place")
            if target.exists() and not replace:
                raise InputError(f"{path} exists: choose another place, or give --force to replace it")
            part.mkdir()  # tests that a folder can be made there, not only the lock file
            part.rmdir()
        yield folder_claim


@contextlib.contextmanager
def _system_errors_told(path: Path, advice: str) -> Iterator[None]:
    """Turns a system error into an InputError of one line that ends with `advice`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        number = SYSTEM_ERROR.search(str(error))
        if not isinstance(error, OSError) and number is None:
            raise
        reason = os.strerror(int(number[1])) if number is not None else error.strerror or str(error)
        if isinstance(error, OSError) and _is_another_file(error, path):
            reason += f": {error.filename}"
        raise InputError(f"{path} cannot be written ({reason}): {advice}") from None


def _is_another_file(error: OSError, path: Path) -> bool:
    """Says whether the error is about a file outside the parent folder of `path`: a file that was to be read."""
    if not isinstance(error.filename, str) or error.filename2 is not None:
        return False
    return Path(os.path.realpath(path)).parent not in Path(os.path.realpath(error.filename)).parents


def _beside(target: Path, suffix: str) -> Path:
    """Returns the hidden name of `target` with a suffix: part, old or lock."""
    return target.parent / f".{target.name}.{suffix}"


def _spread_mode(folder: Path) -> None:
    """Gives all files and folders in `folder` its permissions, whichever library wrote them; files without execution."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    for parent, folders, names in os.walk(folder):
        for name in folders:
            _set_mode(os.path.join(parent, name), mode)
        for name in names:
            _set_mode(os.path.join(parent, name), mode & 0o666)


def _set_mode(path: str | Path, mode: int) -> None:
    """Gives a file or folder its permissions, where its disk keeps any."""
    if stat.S_IMODE(os.stat(path).st_mode) != mode:
        with contextlib.suppress(OSError):
            os.chmod(path, mode)


def _sync(folder: Path) -> None:
    """Flushes all files and folders in `folder` to the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync_one(os.path.join(parent, name))
        _sync_one(parent)


def _sync_one(path: str | Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
