"""The compile cache on disk, which spares later commands compiling; the command line sets it up."""

from __future__ import annotations

import contextlib
from pathlib import Path

import jax

from icejax.files.cache_home import cache_home

MOST_BYTES = 2 * 2**30


def keep_programs(folder: str | None) -> None:
    """Makes JAX save compiled programs in `folder` from now on (None: the user's cache directory, `none`: nowhere).

    Beyond `MOST_BYTES` the least recently used programs are deleted.
    """
    if folder == "none":
        return
    programs = Path(folder or cache_home() / "programs")
    with contextlib.suppress(OSError):  # JAX itself warns of a folder that it cannot write
        _write_missing_times(programs)
    jax.config.update("jax_compilation_cache_dir", str(programs))
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _write_missing_times(programs: Path) -> None:
    """Writes missing times of last use, of programs saved without a size limit or by a process that was killed.

    JAX saves no more programs in a folder where one program has no such time.
    """
    for program in programs.glob("*-cache"):
        last_use = program.with_name(program.name.removesuffix("-cache") + "-atime")
        if not last_use.exists():
            last_use.write_bytes(program.stat().st_mtime_ns.to_bytes(8, "little"))
