"""Compiler options on a command line: ``--flag NAME=VALUE``."""

from __future__ import annotations

from icejax.errors import InputError


def flag(text: str) -> tuple[str, str | bool]:
    """Returns an option's name and value; InputError without an equals sign."""
    name, sign, value = text.partition("=")
    if not sign:
        raise InputError(f"--flag must be NAME=VALUE, got {text!r}")
    return name, {"true": True, "false": False}.get(value.lower(), value)  # XLA takes no text for these
