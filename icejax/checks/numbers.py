"""What numbers may be: each check names the number, and says what was expected and what it got."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from icejax.checks.errors import InputError, quoted

LARGEST = 2**31 - 1  # what an int32 holds, as token ids are
POSITIONS = 2**24  # tokens whose positions are whole numbers in float32, in which RoPE turns by them


def integer(name: str, value: Any, *, least: int = 1, most: int = LARGEST) -> int:
    """Returns a whole number; InputError for another type, truth values included, or one that is out of range."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{name} must be a whole number, got {quoted(value)}")
    if value < least:
        raise InputError(f"{name} must be at least {least}, got {quoted(value)}")
    if value > most:
        raise InputError(f"{name} must be at most {most}, got {quoted(value)}")
    return value


def power_of_two(name: str, value: Any, *, least: int = 1, most: int = LARGEST) -> int:
    """Returns a whole number that is a power of two; InputError for anything else, or one that is out of range."""
    if integer(name, value, least=least, most=most) & (value - 1):
        raise InputError(f"{name} must be a power of two, got {value}")
    return value


def number(name: str, value: Any, *, least: float, most: float, above: bool = False) -> float:
    """Returns a finite number from `least` to `most`, or `above` the least; InputError for anything else."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most  # no NaN is
    if not good or (above and value == least):
        expected = f"above {least:g} and at most {most:g}" if above else f"from {least:g} to {most:g}"
        raise InputError(f"{name} must be a number {expected}, got {quoted(value)}")
    return float(value)


def one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raises InputError for a value that is not allowed."""
    if value not in allowed:
        raise InputError(f"{name} must be one of {', '.join(map(str, allowed))}, got {quoted(value)}")


def is_unicode(text: str) -> bool:
    """Says whether a text can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of another encoding, as the shell passes them on
        return False
    return True
