"""What a command line needs before it can answer: the compile cache, a model and its tokenizer."""

from __future__ import annotations

import argparse
import os
from typing import Any

from rich.console import Console

from icejax import generation
from icejax.commands.programs import keep_programs
from icejax.commands.show import progress
from icejax.models import CausalLM


def load(arguments: argparse.Namespace, console: Console) -> tuple[CausalLM, Any]:
    """Returns the model of the command line and its tokenizer; what is compiled from now on is kept."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would warn that there is no PyTorch
    keep_programs(arguments.compile_cache)
    with progress(console) as bars:
        bar = bars.add_task("load", total=None)
        return generation.load(
            arguments.model or generation.ASSETS,
            dtype=arguments.dtype,
            progress=lambda _, done, total: bars.update(bar, completed=done, total=total),
        )
