"""Checks the jaxtyping annotations of icejax's functions at every call in the test suite; only tests check them."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
from beartype import beartype


def install() -> None:
    """Checks the functions of every icejax module imported from now on.

    The hook puts `jaxtyping.jaxtyped` before every function. It binds the arguments of each call to a signature, so it is left
    out where no annotation has a shape.
    """
    jaxtyped = jaxtyping.jaxtyped

    def jaxtyped_if_shapes(*, typechecker: Callable) -> Callable:
        decorate = jaxtyped(typechecker=typechecker)
        return lambda x: decorate(x) if isinstance(x, type) or any(map(has_shape, annotations(x))) else x

    jaxtyping.jaxtyped = jaxtyped_if_shapes
    jaxtyping.install_import_hook("icejax", f"{__name__}.checked")


def annotations(function: Callable) -> Iterator[Any]:
    """Yields the annotations of a function; one that names what its module defines later is left out, as jaxtyping does."""
    for annotation in function.__annotations__.values():
        try:
            yield eval(annotation, function.__globals__) if isinstance(annotation, str) else annotation
        except (NameError, AttributeError):
            continue


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
