"""What both converters' command lines share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from icejax.command import INTERRUPTED
from icejax.errors import InputError
from icejax.options import Parser


def main(name: str, convert: Callable[..., None], description: str, argv: list[str] | None) -> int:
    """Runs `convert(source, target, force=, progress=)` from the command line; returns the exit status."""
    parser = Parser(prog=f"convert.{name}", description=description)
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("target", metavar="DST", type=Path)
    parser.add_argument("--force", action="store_true", help="replace DST if it is a checkpoint folder")
    arguments = parser.parse_args(argv)
    console = Console(stderr=True)
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
            bar = bars.add_task("convert", total=None)

            def progress(key: str, done: int, total: int) -> None:
                bars.update(bar, completed=done, total=total, description=key)

            convert(arguments.source, arguments.target, force=arguments.force, progress=progress)
    except InputError as error:
        print(f"convert.{name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted: nothing was written")
        return INTERRUPTED
    return 0
