"""Shared by the commands of `bench/`: lists and compiler options as values of options, and the rows that they print."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterable
from pathlib import Path

from icejax.checks.errors import InputError
from icejax.checks.numbers import integer


def flag(text: str) -> tuple[str, str | bool]:
    """Returns the name and value of `NAME=VALUE`; InputError without an equals sign.

    For example, "xla_flag=TRUE" gives ("xla_flag", True), and "level=2" gives ("level", "2").
    """
    name, sign, value = text.partition("=")
    if not sign:
        raise InputError(f"--flag must be NAME=VALUE, got {text!r}")
    return name, {"true": True, "false": False}.get(value.lower(), value)  # XLA refuses text for booleans


def listed(option: str, text: str, allowed: Collection[str]) -> list[str]:
    """Returns the names in a comma-separated text; InputError for a name that is not in `allowed`."""
    if unknown := [name for name in text.split(",") if name not in allowed]:
        raise InputError(f"{option} must be of {', '.join(allowed)}, got {', '.join(unknown)!r}")
    return text.split(",")


def numbers(option: str, text: str, *, least: int = 1, most: int = 2**30) -> list[int]:
    """Returns the whole numbers in a comma-separated text; InputError for others, or for one below `least` or above `most`."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} must be whole numbers, comma-separated, got {text!r}") from None
    return [integer(option, number, least=least, most=most) for number in values]


def make_folder(folder: Path) -> None:
    """Makes a folder for results if there is none; InputError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"results must go to a folder, {folder} cannot be one: {error.strerror}") from None


def print_rows(parser: argparse.ArgumentParser, rows: Iterable[dict]) -> list[dict]:
    """Prints each row as a JSON line once it is measured, and returns all; InputError becomes one line and exit status 2."""
    printed = []
    try:
        for row in rows:
            print(json.dumps(row), flush=True)
            printed.append(row)
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return printed
