"""Files and folders that only the user may read, or write. Commands, evaluations and the user's caches call it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


def make_folder(path: Path) -> None:
    """Makes the folder `path` and its missing parents with mode 0700; a folder that exists keeps its mode."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


def danger(folder: Path, why: str) -> str | None:
    """Returns how others could put files into a folder, and then `why` that matters; None if only the user and groups can."""
    if folder.stat().st_uid != os.geteuid():
        return f"belongs to another user, {why}"
    for parent in (folder, *folder.parents):
        mode = parent.stat().st_mode
        # In a sticky folder, such as /tmp, nobody can rename the folders of others.
        if mode & stat.S_IWOTH and (parent == folder or not mode & stat.S_ISVTX):
            place = "" if parent == folder else f"is in {parent}, which "
            return f"{place}may be written by everybody, {why}"
    return None


def new_file(path: Path) -> BinaryIO:
    """Opens a new file of mode 0600, whatever the umask, to be written; a file or link at `path` is removed before."""
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.fchmod(file, 0o600)  # the umask may take the user's own rights away
    return os.fdopen(file, "wb")
