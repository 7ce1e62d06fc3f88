"""What a command line needs before it can answer: the compile cache, a model and its tokenizer."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from icejax import generation
from icejax.commands.show import progress
from icejax.models import CausalLM

PROGRAMS_BYTES = 2 * 2**30  # of compiled programs that are kept


def load(arguments: argparse.Namespace, console: Console) -> tuple[CausalLM, Any]:
    """Returns the model of the command line and its tokenizer; what is compiled from now on is kept."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would warn that there is no PyTorch
    _use_compile_cache(arguments.compile_cache)
    with progress(console) as bars:
        bar = bars.add_task("load", total=None)
        return generation.load(
            arguments.model or generation.ASSETS,
            dtype=arguments.dtype,
            progress=lambda _, done, total: bars.update(bar, completed=done, total=total),
        )


def _use_compile_cache(folder: str | None) -> None:
    """Turns JAX's persistent compilation cache on: compiling takes longer than a short answer.

    When it is full, the programs that were used longest ago make room.
    """
    if folder == "none":
        return
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    programs = Path(folder or Path(home) / "icejax" / "programs")
    with contextlib.suppress(OSError):  # JAX warns of a folder that it cannot write
        _tell_times(programs)
    jax.config.update("jax_compilation_cache_dir", str(programs))
    jax.config.update("jax_compilation_cache_max_size", PROGRAMS_BYTES)
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
