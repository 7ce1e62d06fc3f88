"""Files and folders that only the user may read. `icejax.commands`, `icejax.evaluation` and `icejax.runtime` call it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def make_folder(path: Path) -> None:
    """Makes the folder `path` and its missing parents with mode 0700; a folder that exists keeps its mode."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


def new_file(path: Path) -> BinaryIO:
    """Opens a new file of mode 0600, whatever the umask, to be written; a file or link at `path` is removed before."""
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.fchmod(file, 0o600)  # the umask may take the user's own rights away
    return os.fdopen(file, "wb")
