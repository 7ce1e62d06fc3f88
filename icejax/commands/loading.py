"""What a command line needs before it can answer: the compile cache, a model and its tokenizer."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from icejax import generation
from icejax.commands.show import progress
from icejax.models import CausalLM


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
    """Turns JAX's persistent compilation cache on: compiling takes longer than a short answer."""
    if folder == "none":
        return
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", folder or str(Path(home) / "icejax" / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
