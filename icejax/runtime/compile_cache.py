"""The compile cache on disk, which spares later commands compiling; the command line sets it up.

JAX runs the programs in its folder, so the folder must be the user's. JAX's own warnings about programs become one line each.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jax

from icejax.files import private
from icejax.files.cache_home import cache_home

MOST_BYTES = 2 * 2**30
LOG = logging.getLogger(__name__)
# JAX's warning about a program: reading or writing, the name of the program, and the error.
FAULT = re.compile(r"Error (reading|writing) persistent compilation cache entry for '(.*?)': (.*)", re.DOTALL)
# An error of the disk or of the folder's lock; any other error in reading means that the program is damaged.
OF_THE_DISK = re.compile(r"\w+: \[Errno (\d+)\]|Timeout|NotImplementedError")


def keep_programs(folder: str | None) -> None:
    """Makes JAX save compiled programs in `folder` from now on (None: the user's cache directory, `none`: nowhere).

    Beyond `MOST_BYTES` the least recently used programs are deleted. A folder that cannot be written, or that others may fill,
    is not used; a warning says so.
    """
    if folder == "none":
        return
    programs = Path(os.path.realpath(folder or cache_home() / "programs"))
    try:
        private.make_folder(programs)
        danger = private.danger(programs, "whose programs would run")
        if danger is None:
            tempfile.TemporaryFile(dir=programs).close()  # tests that files can be made there
            _write_missing_times(programs)
    except OSError as error:
        danger = f"cannot be written ({error.strerror})"
    if danger is not None:
        advice = "choose another folder by --compile-cache, or 'none'"
        LOG.warning("compiled programs are not kept: %s %s; %s", programs, danger, advice)
        jax.config.update("jax_compilation_cache_dir", None)
        return
    _tell_faults(programs)
    jax.config.update("jax_compilation_cache_dir", str(programs))
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _tell_faults(programs: Path) -> None:
    """Replaces JAX's warnings about programs by a line for damage and a line for the disk, and removes damaged programs."""
    show, told = warnings.showwarning, set()

    def showwarning(message: Warning | str, *arguments: Any, **options: Any) -> None:
        fault = FAULT.fullmatch(str(message))
        if fault is None:
            return show(message, *arguments, **options)
        action, program, reason = fault.groups()
        of_the_disk = OF_THE_DISK.match(reason)
        is_damaged = action == "reading" and of_the_disk is None
        with contextlib.suppress(OSError):
            _remove_damaged(programs, program if is_damaged else None)
        if is_damaged not in told:
            told.add(is_damaged)
            if of_the_disk is not None and of_the_disk[1] is not None:
                reason = os.strerror(int(of_the_disk[1]))
            fate = "a program in %s is damaged and is compiled again (%s)" if is_damaged else "programs are not kept in %s (%s)"
            LOG.warning("compile cache: " + fate, programs, reason[:200])

    warnings.showwarning = showwarning
    warnings.filterwarnings("always", message=FAULT.pattern)  # each damaged program, not the first of a kind alone


def _remove_damaged(programs: Path, name: str | None) -> None:
    """Removes the program called `name` that was read last, and programs without a time of last use, which are not whole."""
    if name is not None:
        times = [path for path in programs.glob("*-atime") if path.name.startswith(f"{name}-")]
        last = max(times, key=lambda path: int.from_bytes(path.read_bytes(), "little"), default=None)
        if last is not None:
            last.unlink()
    for program in programs.glob("*-cache"):
        if not _last_use(program).exists():
            program.unlink()


def _write_missing_times(programs: Path) -> None:
    """Writes missing times of last use, of programs saved without a size limit or by a process that was killed.

    JAX saves no more programs in a folder where one program has no such time.
    """
    for program in programs.glob("*-cache"):
        if not _last_use(program).exists():
            _last_use(program).write_bytes(program.stat().st_mtime_ns.to_bytes(8, "little"))


def _last_use(program: Path) -> Path:
    """Returns the file of the time at which a program was last used."""
    return program.with_name(program.name.removesuffix("-cache") + "-atime")
