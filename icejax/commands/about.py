"""What ``icejax`` prints without a command: usage, version, or an error for an unknown command."""

from icejax import __version__
from icejax.checks.errors import InputError, suggestion
from icejax.commands import COMMANDS
from icejax.commands.terminal.process import ending, write

USAGE = "usage: icejax COMMAND ...\n\n" + "".join(f"  {name:10} {does}\n" for name, does in COMMANDS.items())
USAGE += "\nicejax COMMAND --help tells more, icejax --version the version.\n"
ANSWERS = {"--help": USAGE, "-h": USAGE, "--version": f"icejax {__version__}\n"}


def main(argv: list[str], *, name: str) -> int:
    """Answers the one argument, which names no command; returns the exit status."""
    return ending(name, lambda: _tell(*argv))


def _tell(word: str) -> None:
    if word not in ANSWERS:
        known = [*COMMANDS, *ANSWERS]
        raise InputError(f"there is no command {word!r}: expected one of {', '.join(COMMANDS)}{suggestion(word, known)}")
    write(ANSWERS[word])
