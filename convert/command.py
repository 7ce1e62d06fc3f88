"""What both converters' command lines share."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from icejax.checkpoint import convert
from icejax.launch import ending
from icejax.options import Parser

DESCRIPTIONS = {
    "hf_to_orbax": "Hugging Face folder or hub id SRC -> icejax (Orbax) folder DST.",
    "orbax_to_hf": "icejax (Orbax) folder SRC -> Hugging Face folder DST.",
}


def main(name: str, argv: list[str] | None = None) -> int:
    """Runs the converter `name` of `icejax.checkpoint.convert` from the command line; returns the exit status."""
    return ending(f"convert.{name}", lambda: _run(name, argv))


def _run(name: str, argv: list[str] | None) -> None:
    parser = Parser(prog=f"convert.{name}", description=DESCRIPTIONS[name])
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("target", metavar="DST", type=Path)
    parser.add_argument("--force", action="store_true", help="replace DST if it is a checkpoint folder")
    arguments = parser.parse_args(argv)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("convert", total=None)

        def progress(key: str, done: int, total: int) -> None:
            bars.update(bar, completed=done, total=total, description=key)

        getattr(convert, name)(arguments.source, arguments.target, force=arguments.force, progress=progress)
