"""The one exception that is the user's to mend."""

from __future__ import annotations

import contextlib
import difflib
import reprlib
from collections.abc import Iterable, Iterator

LONGEST = 4000  # characters of a message: names out of a broken file have no bound
QUOTE = reprlib.Repr()
QUOTE.maxstring = QUOTE.maxother = QUOTE.maxlong = 120
QUOTE.maxlist = QUOTE.maxdict = 8


class InputError(ValueError):
    """Raised for bad input: the message is one line that says what was expected, what was found and what to do.

    The command lines print it as it is and exit with status 2. What is not printable, line ends included, is written as in
    a Python string, so that no name out of a file can break the line or reach the terminal as a command.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message if len(message) <= LONGEST else message[:LONGEST] + "..."))


def printable(text: str) -> str:
    """Returns `text` with what is not printable as in a Python string: one line that is no command to a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@contextlib.contextmanager
def input_error_from(what: str) -> Iterator[None]:
    """Tells any fault of a library that reads what anyone may have written in one line, which begins with `what`.

    A panic of Rust is no Exception.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, InputError):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{what}: {reason}") from None


def quoted(value: object) -> str:
    """Returns a value as Python writes it, cut short where it is long or deep."""
    try:
        return QUOTE.repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "a number of thousands of digits"


def listed(faults: list[str]) -> str:
    """Returns the first twenty of several faults, and how many more there are."""
    return "; ".join(faults[:20]) + (f"; and {len(faults) - 20} more" if len(faults) > 20 else "")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns a question after the known name that is most like `name`, to stand behind a message; nothing if none is."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
