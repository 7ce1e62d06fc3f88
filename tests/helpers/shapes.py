"""Checks the jaxtyping annotations of icejax's functions at every call in the test suite; only tests check them."""

from __future__ import annotations

import functools
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

    Functions without array shapes check their own arguments and raise one-line errors, which tests match. The check is made at
    the first call: it takes a millisecond, and a process that runs one test calls few of the functions.
    """
    if not any(map(has_shape, function.__annotations__.values())):
        return function
    made = functools.cache(lambda: beartype(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return made()(*args, **kwargs)

    return call


def has_shape(annotation: Any) -> bool:
    """Whether an annotation has the shape of an array."""
    parts = typing.get_args(annotation)
    return any(map(has_shape, parts)) or isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray)
