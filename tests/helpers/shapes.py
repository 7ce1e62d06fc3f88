"""Checks the jaxtyping annotations of icejax's functions at every call in the test suite; only tests check them."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import beartype


def install() -> None:
    """Checks the functions of every icejax module imported from now on."""
    jaxtyping.install_import_hook("icejax", f"{__name__}.checked")


def checked(function: Callable) -> Callable:
    """Returns `function`, with its arguments and result checked if an annotation has a shape.

    Functions without array shapes check their own arguments and raise one-line errors, which tests match.
    """
    return beartype(function) if any(map(_has_shape, function.__annotations__.values())) else function


def _has_shape(annotation: Any) -> bool:
    parts = typing.get_args(annotation)
    return any(map(_has_shape, parts)) or isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray)
