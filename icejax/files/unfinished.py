"""Files and folders that are being written: an interrupt removes them.

`icejax.files` registers them, `icejax.commands.terminal.process` removes them.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

_paths: list[Path] = []


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[None]:
    """Registers the file or folder `path` while the block runs: an interrupt then removes it."""
    _paths.append(path)
    try:
        yield
    finally:
        _paths.remove(path)


def remove_unfinished(*, seconds: float) -> None:
    """Removes unfinished files and folders, repeatedly for `seconds`, because writers continue until the process ends."""
    stop = time.monotonic() + seconds
    while any(path.exists() for path in _paths) and time.monotonic() < stop:
        for path in reversed(_paths):
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
