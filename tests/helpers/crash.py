"""Processes that die at a given step, and files that cannot be written to their end."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
from collections.abc import Iterator

STEPS = ("open", "mkdir", "rename", "unlink", "rmdir", "write", "ftruncate", "fsync", "scandir")


class Killed(BaseException):
    """What ends a process: nothing of it does anything any more."""


def killed_at(step: int, monkeypatch) -> None:
    """Lets the process die before its `step`th operation on files: that one and every later one does nothing."""
    count = itertools.count(1)

    def dying(real):
        def operation(*arguments, **options):
            if next(count) >= step:
                raise Killed
            return real(*arguments, **options)

        return operation

    for name in STEPS:
        monkeypatch.setattr(os, name, dying(getattr(os, name)))


@contextlib.contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Lets no file grow beyond `size` bytes: Python ignores the signal, so that a write fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
