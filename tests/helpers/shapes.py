"""Shapes checked: what functions of icejax say of their arrays holds for every call in the suite; in use nothing is checked."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import beartype


def install() -> None:
    """Checks what is imported of icejax from now on."""
    jaxtyping.install_import_hook("icejax", f"{__name__}.checked")


def checked(function: Callable) -> Callable:
    """Returns a function that checks its arguments and result if it takes or returns a shape.

    Others check for themselves what they are given, and say so in one line.
    """
    return beartype(function) if any(map(_has_shape, function.__annotations__.values())) else function


def _has_shape(annotation: Any) -> bool:
    parts = typing.get_args(annotation)
    return any(map(_has_shape, parts)) or isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray)
