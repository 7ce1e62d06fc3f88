"""Checks of numbers: a message names the number, the expected range and the given value. Options and config fields use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from icejax.checks.errors import InputError, quoted

LARGEST = 2**31 - 1  # the largest int32; token ids are int32
POSITIONS = 2**24  # RoPE computes in float32, which holds whole numbers exactly up to here


def integer(name: str, value: Any, *, least: int = 1, most: int = LARGEST) -> int:
    """Returns a whole number from `least` to `most`; InputError for another number or type, bool included."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{name} must be a whole number, got {quoted(value)}")
    if value < least:
        raise InputError(f"{name} must be at least {least}, got {quoted(value)}")
    if value > most:
        raise InputError(f"{name} must be at most {most}, got {quoted(value)}")
    return value


def integers(name: str, text: str, *, least: int = 1, most: int = LARGEST) -> list[int]:
    """Returns the whole numbers of a comma-separated text, each as `integer` does; InputError for any other text."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{name} must be whole numbers, comma-separated, got {text!r}") from None
    return [integer(name, number, least=least, most=most) for number in numbers]


def power_of_two(name: str, value: Any, *, least: int = 1, most: int = LARGEST) -> int:
    """Returns a power of two from `least` to `most`; InputError for anything else."""
    if integer(name, value, least=least, most=most) & (value - 1):
        raise InputError(f"{name} must be a power of two, got {value}")
    return value


def number(name: str, value: Any, *, least: float, most: float, above: bool = False) -> float:
    """Returns a finite number from `least` to `most`; InputError for anything else, and for `least` itself if `above`."""
    valid = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most  # False for NaN
    if not valid or (above and value == least):
        expected = f"above {least:g} and at most {most:g}" if above else f"from {least:g} to {most:g}"
        raise InputError(f"{name} must be a number {expected}, got {quoted(value)}")
    return float(value)


def one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raises InputError if the value is not one of `allowed`."""
    if value not in allowed:
        raise InputError(f"{name} must be one of {', '.join(map(str, allowed))}, got {quoted(value)}")


def is_unicode(text: str) -> bool:
    """Says whether a text can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:  # Python reads arguments that are not UTF-8 as lone surrogates
        return False
    return True
