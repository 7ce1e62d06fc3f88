"""The host's memory: what the machine has and what the control group of this process (cgroups(7)) may take of it.

`devices` asks for both. In a container, a pod or a batch job the group's limit is often far below the machine's memory, and the
kernel ends a process that passes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Of each version: the files of the limit and of the bytes in use, and the name of those that the kernel can take back.
VERSION_2 = ("memory.max", "memory.current", "inactive_file")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def total() -> int:
    """Returns the bytes of memory that this process can have at most."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits())])


def free() -> int:
    """Returns the bytes of memory that are free for this process."""
    return max(0, min([psutil.virtual_memory().available, *(limit - used for limit, used in _limits())]))


def _limits() -> Iterator[tuple[int, int]]:
    """Yields the limit and the used bytes of the process's memory groups that have a limit."""
    for folder, (most, used, unneeded) in _groups():
        try:
            limit, in_use = (folder / most).read_text().strip(), int((folder / used).read_text())
            parts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            if limit != "max":
                yield int(limit), in_use - int(parts.get(unneeded, 0))
        except (OSError, ValueError):
            continue


def _groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yields the folders of the process's memory groups, with the names of their files."""
    try:
        lines = GROUPS.read_text().splitlines()
    except OSError:  # no Linux
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        version = VERSION_1 if "memory" in controllers.split(",") else VERSION_2 if not controllers else None
        if version is None:
            continue
        root = ROOT / "memory" if version is VERSION_1 else ROOT
        own = Path(path.strip("/"))  # in a container the folder may be that of the root, whatever the path says
        yield from ((root / part, version) for part in (own, *own.parents))
