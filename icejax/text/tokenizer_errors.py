"""Errors of the tokenizers library, whose Rust code prints lines of its own when it panics: a command shows one line of ours.

Everything in icejax that calls a tokenizer uses `tokenizer_error_from`; `icejax.commands.terminal.process` calls the rest.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from icejax.checks.errors import input_error_from

STDERR = 2
_files: list[int] = []  # the command's stderr, and the file that takes its place while a tokenizer runs


def own_stderr() -> None:
    """Lets `tokenizer_error_from` redirect the process's stderr from now on, as a command may and a library must not."""
    with contextlib.suppress(OSError):
        stderr = os.dup(STDERR)
        held = os.memfd_create("stderr") if hasattr(os, "memfd_create") else os.dup(tempfile.TemporaryFile().fileno())
        _files[:] = [stderr, held]


def show_stderr() -> None:
    """Brings stderr back at once, for the last line of a process that ends while a tokenizer runs."""
    if _files:
        os.dup2(_files[0], STDERR)


@contextlib.contextmanager
def tokenizer_error_from(what: str) -> Iterator[None]:
    """Turns any error of a tokenizer into an InputError of one line, which begins with `what`.

    Output to stderr is printed at the end of the block, or dropped if the block ends with a panic.
    """
    with input_error_from(what), _panic_hidden():
        yield


@contextlib.contextmanager
def _panic_hidden() -> Iterator[None]:
    if not _files:
        yield
        return
    stderr, held = _files
    os.dup2(held, STDERR)
    panicked = False
    try:
        yield
    except BaseException as error:
        panicked = type(error).__name__ == "PanicException"  # the class cannot be imported
        raise
    finally:
        os.dup2(stderr, STDERR)
        size = os.fstat(held).st_size
        if size:
            text = os.pread(held, size, 0)
            os.ftruncate(held, 0)
            os.lseek(held, 0, os.SEEK_SET)
            if not panicked:
                with contextlib.suppress(OSError):  # stderr may be full or closed
                    os.write(stderr, text)
