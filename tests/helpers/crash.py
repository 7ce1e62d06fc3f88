"""Simulated crashes: a process that dies at a given file operation, and a full disk."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
from collections.abc import Iterator

STEPS = ("open", "mkdir", "rename", "unlink", "rmdir", "write", "ftruncate", "fsync", "scandir")


class Killed(BaseException):
    """The death of the process: a BaseException, so that no `except Exception` outlives it."""


def killed_at(step: int, monkeypatch) -> None:
    """Lets the process die at its file operation number `step`, from 1: that one and all later ones only raise Killed."""
    count = itertools.count(1)

    def wrapped(real):
        def operation(*arguments, **options):
            if next(count) >= step:
                raise Killed
            return real(*arguments, **options)

        return operation

    for name in STEPS:
        monkeypatch.setattr(os, name, wrapped(getattr(os, name)))


@contextlib.contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Makes a write beyond `size` bytes of a file fail with OSError; Python ignores the signal that comes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
