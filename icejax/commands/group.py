"""A command that runs in several processes: it joins them, tells the others what process 0 reads, and ends with the group.

JAX ends a process whose group has lost another one by aborting, with a page of C++ on stderr; here it ends with one line.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from icejax.checks.errors import InputError, quoted
from icejax.commands.requests import PromptLine, read_prompts
from icejax.runtime import processes
from icejax.runtime.processes import LOST_LINE, GroupError
from icejax.text import tokenizer_errors

LOST = 1  # exit status of a process whose group has lost another one
ABSENT_LINE = "not all processes of the group have joined it in five minutes: see that the coordinator's port can be reached"
# Options that may differ from process to process; the last ones are those of process 0's port. Keys are sent to nobody.
OWN = ("process", "compile_cache", "quiet", "verbose", "host", "port", "api_key", "no_auth")
_stderr: list[int] = []  # the command's own, and the file that C++ code writes to in its place


@contextlib.contextmanager
def in_group(arguments: argparse.Namespace, name: str, *, alone: Sequence[str]) -> Iterator[None]:
    """Runs the block in the group of processes of the command line, if it names one.

    In processes other than the first, `arguments.quiet` is set. The block runs to its end in all processes, or in none: they
    wait for each other at its end, and the failure of one ends the others with a line and the status `LOST`.

    Args:
        alone: names of options that a group does not have.

    Raises:
        InputError: an option of the group is invalid or missing, or a process has other options than the first.
    """
    if arguments.coordinator is None:
        for option in ("processes", "process"):
            if getattr(arguments, option) is not None:
                raise InputError(f"--{option} needs --coordinator HOST:PORT")
        yield
        return
    for option in alone:
        if getattr(arguments, option) is not None:
            raise InputError(f"--{option.replace('_', '-')} runs in one process: leave --coordinator out")
    if arguments.mesh is None:
        raise InputError("--coordinator needs --mesh heads=N: the processes share the KV heads of one model")
    processes.membership(arguments.coordinator, arguments.processes, arguments.process)
    with _quiet_runtime(name):
        try:
            processes.join(arguments.coordinator, processes=arguments.processes, process=arguments.process)
            _check_options(arguments)
            arguments.quiet |= not processes.is_first()
            yield
            processes.leave()
        except (RuntimeError, ValueError) as error:
            if isinstance(error, InputError) or not (isinstance(error, GroupError) or processes.is_loss(error)):
                raise
            line = error if isinstance(error, GroupError) else LOST_LINE
            print(f"{name}: error: {line}", file=sys.stderr, flush=True)
            abandon(LOST)


def abandon(status: int) -> NoReturn:
    """Ends this process at once, and so its group: Python's own end would wait for the others."""
    os._exit(status)


def read_in_group(arguments: argparse.Namespace) -> list[PromptLine]:
    """Returns the prompts of the command line; in a group of processes the first one reads them, for all."""
    if arguments.coordinator is None:
        return read_prompts(arguments)
    lines = [dataclasses.asdict(line) for line in read_prompts(arguments)] if processes.is_first() else None
    return [
        PromptLine(**fields | dict(stop=fields["stop"] and tuple(fields["stop"]))) for fields in processes.from_first(lines)
    ]


def is_first(arguments: argparse.Namespace) -> bool:
    """Says whether this process prints or sends the answers: of a group the first one does."""
    return arguments.coordinator is None or processes.is_first()


def _check_options(arguments: argparse.Namespace) -> None:
    """Raises InputError if this process has other options than the first one."""
    own = {key: repr(value) for key, value in vars(arguments).items() if key not in OWN}
    for key, value in processes.from_first(own).items():
        if own[key] != value:
            flag = "--" + key.replace("_", "-")
            raise InputError(f"{flag} is {quoted(own[key])} here and {quoted(value)} in process 0: give all processes the same")


@contextlib.contextmanager
def _quiet_runtime(name: str) -> Iterator[None]:
    """Hides what C++ code prints: gloo's line on stdout, and on stderr what comes before JAX aborts for a lost process.

    Everything else on stderr is printed at the end of the block, unless it ends by bad input, or before another abort.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_moved(stream) for stream in streams)
    with tempfile.TemporaryFile() as file:
        _stderr[:] = sys.stderr.fileno(), os.dup(file.fileno())
    os.dup2(os.open(os.devnull, os.O_WRONLY), streams[0].fileno())
    os.dup2(_stderr[1], streams[1].fileno())
    tokenizer_errors.own_stderr()  # from now on it redirects what takes stderr's place
    aborted, shown = _on_abort(name), True
    try:
        yield
    except InputError:
        shown = False
        raise
    finally:
        if shown:
            _show_held()
        os.dup2(_stderr[0], streams[1].fileno())
        ctypes.CDLL(None).signal(signal.SIGABRT, None)  # the default
        del aborted


def _moved(stream: Any) -> Any:
    """Returns a stream to the same place under another number, which C++ code does not know."""
    stream.flush()
    return open(os.dup(stream.fileno()), "w", encoding=stream.encoding, errors=stream.errors, buffering=1)


def _show_held() -> None:
    os.write(_stderr[0], _held())


def _held() -> bytes:
    return os.pread(_stderr[1], os.fstat(_stderr[1]).st_size, 0)


def _on_abort(name: str) -> Callable[[int], None]:
    """Makes an abort of C++ code end the process with one line, if JAX aborts because a process is lost; returns the handler.

    Python's own handler of signals would wait for the code that aborts.
    """

    def end(_: int) -> None:
        if b"distributed service detected fatal errors" in (held := _held()):
            line = ABSENT_LINE if b"RegisterTask" in held else LOST_LINE
            os.write(_stderr[0], f"{name}: error: {line}\n".encode())
            os._exit(LOST)
        _show_held()
        os._exit(128 + signal.SIGABRT)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(end)
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)
    return handler
