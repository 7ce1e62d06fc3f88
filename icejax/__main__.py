"""``icejax COMMAND``: every command under one name."""

import sys
from typing import NoReturn

from icejax.commands import COMMANDS
from icejax.commands.terminal.process import launch


def main() -> NoReturn:
    """Runs the command that the first argument names, then ends the process."""
    first, *arguments = sys.argv[1:] or ["--help"]
    if first in COMMANDS:
        launch(f"icejax.commands.{first}", arguments, name=f"icejax {first}")
    launch("icejax.commands.about", [first], name="icejax")


if __name__ == "__main__":
    main()
