"""A lock file, which one writer of one process holds at a time. `icejax.files.atomic_folder` calls it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from icejax.checks.errors import InputError
from icejax.files.unfinished import unfinished


@contextlib.contextmanager
def locked(path: Path, lock: Path) -> Iterator[None]:
    """Holds the lock file `lock` while the block runs, then removes it.

    Args:
        path: what the lock protects, for messages.
        lock: the lock file.

    Raises:
        InputError: another writer holds the lock, or the lock's path is a link or no regular file.
    """
    while True:
        try:
            file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError:
            if not os.path.islink(lock):
                raise
            raise InputError(f"{lock} is a link, and would be written to: remove it, or choose another place") from None
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise InputError(f"{lock} is no file: remove it, or choose another place")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, lock):
                break
        except BlockingIOError:
            holder = os.pread(file, 20, 0).decode(errors="replace")
            os.close(file)
            owner = "another writer of this process" if holder == str(os.getpid()) else f"another process (pid {holder or '?'})"
            raise InputError(f"{path} is in use by {owner}: wait for it, or choose another place") from None
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # the previous holder removed the file: make a new one
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        with unfinished(lock):
            yield
    finally:
        try:
            if _is_at(file, lock):
                os.unlink(lock)
        finally:
            os.close(file)


def _is_at(file: int, path: Path) -> bool:
    """Says whether `path` is still the open file: another process may have removed it."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.lstat(path))
    return False
