"""Compiled programs, kept from one command to the next: compiling takes longer than a short answer."""

from __future__ import annotations

import contextlib
from pathlib import Path

import jax

from icejax.files.cache_home import cache_home

MOST_BYTES = 2 * 2**30


def keep_programs(folder: str | None) -> None:
    """Has JAX keep what it compiles from now on in `folder` (None: in the user's cache directory, `none`: nowhere).

    When they take too many bytes, the programs that were used longest ago make room.
    """
    if folder == "none":
        return
    programs = Path(folder or cache_home() / "programs")
    with contextlib.suppress(OSError):  # JAX warns of a folder that it cannot write
        _tell_times(programs)
    jax.config.update("jax_compilation_cache_dir", str(programs))
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _tell_times(programs: Path) -> None:
    """Writes when a program was used for those that were kept without a bound, or by a process that was killed.

    JAX keeps nothing more in a folder with one program whose time it does not find.
    """
    for program in programs.glob("*-cache"):
        used = program.with_name(program.name.removesuffix("-cache") + "-atime")
        if not used.exists():
            used.write_bytes(program.stat().st_mtime_ns.to_bytes(8, "little"))
