"""InputError, the exception for bad input, and helpers for its messages. Every module of icejax that checks input calls it."""

from __future__ import annotations

import contextlib
import difflib
import reprlib
from collections.abc import Iterable, Iterator

LONGEST = 4000  # characters of a message, because a name in a broken file may have any length
QUOTE = reprlib.Repr()
QUOTE.maxstring = QUOTE.maxother = QUOTE.maxlong = 120
QUOTE.maxlist = QUOTE.maxdict = 8


class InputError(ValueError):
    """Raised for bad input, with a message of one line: the expected value, the given value, and what to do.

    The command lines print the message and exit with status 2. Unprintable characters, line ends included, are escaped as in a
    Python string, so that a name from a file cannot break the line or act as a terminal command.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message if len(message) <= LONGEST else message[:LONGEST] + "..."))


def printable(text: str) -> str:
    """Returns `text` with unprintable characters escaped as in a Python string: one line without terminal commands."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@contextlib.contextmanager
def input_error_from(what: str) -> Iterator[None]:
    """Turns any error of a library that reads files of unknown origin into an InputError of one line, which begins with `what`.

    It catches BaseException, because a Rust panic is not an Exception.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, InputError):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{what}: {reason}") from None


def quoted(value: object) -> str:
    """Returns the repr of a value, shortened if it is long or deep."""
    try:
        return QUOTE.repr(value)
    except ValueError:  # Python refuses to write a whole number of more than 4,300 digits
        return "a number of thousands of digits"


def listed(faults: list[str]) -> str:
    """Returns the first twenty of the faults, joined by semicolons, and how many more there are."""
    return "; ".join(faults[:20]) + (f"; and {len(faults) - 20} more" if len(faults) > 20 else "")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns a question that names the known name closest to `name`, to append to a message; empty if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
