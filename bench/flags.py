"""What command lines of several benches take: lists, and compiler options as ``--flag NAME=VALUE``."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from icejax.checks.errors import InputError
from icejax.checks.numbers import integer


def flag(text: str) -> tuple[str, str | bool]:
    """Returns an option's name and value; InputError without an equals sign."""
    name, sign, value = text.partition("=")
    if not sign:
        raise InputError(f"--flag must be NAME=VALUE, got {text!r}")
    return name, {"true": True, "false": False}.get(value.lower(), value)  # XLA takes no text for these


def listed(option: str, text: str, allowed: Collection[str]) -> list[str]:
    """Returns the names in a text with commas; InputError for one that is not allowed."""
    if unknown := [name for name in text.split(",") if name not in allowed]:
        raise InputError(f"{option} must be of {', '.join(allowed)}, got {', '.join(unknown)!r}")
    return text.split(",")


def numbers(option: str, text: str, *, least: int = 1, most: int = 2**30) -> list[int]:
    """Returns the numbers in a text with commas; InputError for what is none, too small or too large."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} must be whole numbers, comma-separated, got {text!r}") from None
    return [integer(option, number, least=least, most=most) for number in found]


def make_folder(folder: Path) -> None:
    """Makes a folder for results, where there is none; InputError if that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"results must go to a folder, {folder} cannot be one: {error.strerror}") from None
