"""How a command begins and ends: with an exit status and at most one line of error, whatever happens to signals and streams.

Every command calls `launch` and `ending`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import signal
import socket
import sys
import termios
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from icejax.checks.errors import InputError, printable
from icejax.files.unfinished import remove_unfinished
from icejax.text import tokenizer_errors

BROKEN_PIPE = 141  # exit status, as a shell reports this signal
ENDINGS = {signal.SIGINT: ("interrupted", 130), signal.SIGTERM: ("terminated", 143)}  # line and exit status of each signal
REMOVE_S = 2.0  # seconds for removing unfinished files and folders after a signal
# All control characters but tab and newline, and those that turn the direction of the text around them.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")

LOG = logging.getLogger("icejax")
_instead: list[Callable[[], None]] = []  # called by an interrupt, which then does not end the command
_drains: list[Callable[[], None]] = []  # called by the first signal in a server
_wakeup: list[socket.socket] = []
_answers: list[_Answer] = []  # the answer that is being written
_terminal: list[Any] = []  # settings of the terminal of stdin when the command began


def launch(module: str, argv: list[str] | None = None, *, name: str, **more: str) -> NoReturn:
    """Imports `module`, runs its `main(argv, name=name, **more)` and ends the process with the returned status; see `ending`.

    From here on Ctrl-C ends the process with one line and status 130, even while it imports, compiles or computes, and SIGTERM
    with status 143. Python's KeyboardInterrupt would wait for C code to return, and is lost inside a callback.
    """
    if sys.stdin is None:  # stdin is closed: the next opened file would take its number
        sys.stdin = open(os.devnull)
    if sys.stdout is None:
        _complain(f"{name}: error: stdout is closed: expected a terminal, a pipe or a file for the answer")
        os._exit(2)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    _own_signals()
    tokenizer_errors.own_stderr()
    warnings.showwarning = lambda message, category, *_, **__: LOG.warning("%s: %s", category.__name__, message)
    sys.modules.setdefault("torch", None)  # keeps transformers from importing torch, which takes seconds and has no use here
    if not is_unicode():
        sys.stdout.reconfigure(errors="backslashreplace")
        _complain(f"{name}: warning: stdout takes {sys.stdout.encoding}, not UTF-8: other characters are written as escapes")
    status = importlib.import_module(module).main(argv, name=name, **more)
    # os._exit: Python's own exit ignores Ctrl-C, and crashes while an abandoned compiled program still runs.
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(status or 0)


def ending(name: str, work: Callable[[], int | None]) -> int:
    """Runs `work` and returns the exit status: its own or 0, 2 with one line for an InputError, 141 for a closed pipe.

    Each warning of the package is printed once, as one line.
    """
    handler = _Warnings(name)
    LOG.addHandler(handler)
    LOG.propagate = False
    try:
        try:
            status = work() or 0
        except SystemExit as end:  # from argparse
            status = end.code
        write("")
        return status
    except InputError as error:
        _complain(f"{name}: error: {error}")
        return 2
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    finally:
        LOG.propagate = True
        LOG.setLevel(logging.NOTSET)
        LOG.removeHandler(handler)


class OutputError(InputError):
    """Raised if stdout cannot be written: the command must stop, since it could print nothing more."""


class _Warnings(logging.Handler):
    """Prints each log message once, in the form of an error line."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name, self._told = name, set()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in self._told:
            self._told.add(message)
            line = printable(f"{self._name}: {record.levelname.lower()}: {message}")
            if _answers and _answers[-1].begun:
                _answers[-1].lines.append(line)
            else:
                _complain(line)


@dataclass
class _Answer:
    """An answer that is written piece by piece: whether text of it is out, and lines of the log that wait for its end."""

    begun: bool = False
    lines: list[str] = field(default_factory=list)


@contextlib.contextmanager
def uncut() -> Iterator[None]:
    """Prints no line of the log between the pieces of text that the block writes, but before or after them."""
    answer = _Answer()
    _answers.append(answer)
    try:
        yield
    finally:
        _answers.remove(answer)
        for line in answer.lines:
            _complain(line)


def write(text: str) -> None:
    """Writes `text` to stdout at once; OutputError if stdout cannot be written."""
    if _answers and text:
        _answers[-1].begun = True
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard_output()
        raise OutputError(f"stdout cannot be written ({error.strerror}): choose another place for the answer") from None


def escaped(text: str) -> str:
    """Returns model text for stdout: on a terminal, control characters are escaped, because it would obey them."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text) if sys.stdout.isatty() else text


def is_unicode() -> bool:
    """Says whether stdout can encode every character."""
    return (sys.stdout.encoding or "utf-8").lower().replace("-", "").startswith("utf")


@contextlib.contextmanager
def instead_of_ending(action: Callable[[], None]) -> Iterator[None]:
    """Makes Ctrl-C call `action` in another thread while the block runs, instead of ending the command."""
    _instead.append(action)
    try:
        yield
    finally:
        _instead.remove(action)


@contextlib.contextmanager
def draining(action: Callable[[], None]) -> Iterator[None]:
    """Makes the first Ctrl-C or SIGTERM call `action` in another thread while the block runs; a second one ends the command."""
    _drains.append(action)
    try:
        yield
    finally:
        _drains.remove(action)


def _own_signals() -> None:
    """Starts the thread that handles Ctrl-C and SIGTERM."""
    _wakeup.extend(socket.socketpair())
    for end in _wakeup:
        end.setblocking(end is _wakeup[0])
    with contextlib.suppress(OSError, termios.error, ValueError):  # stdin is no terminal
        _terminal.append(termios.tcgetattr(sys.stdin.fileno()))
    signal.signal(signal.SIGTERM, _terminate)
    os.register_at_fork(after_in_child=_default_signals)
    listen()
    threading.Thread(target=_watch, daemon=True).start()


def _default_signals() -> None:
    """Lets signals end a forked process, which has no such thread and shares the sockets with this one."""
    signal.set_wakeup_fd(-1)
    for number in ENDINGS:
        signal.signal(number, signal.SIG_DFL)


def listen() -> None:
    """Takes Ctrl-C back after a prompt has handled it; does nothing in a process without `launch`."""
    if _wakeup:
        signal.signal(signal.SIGINT, _pause)
        signal.set_wakeup_fd(_wakeup[1].fileno(), warn_on_full_buffer=False)


def _pause(*_: object) -> None:
    """Holds the main thread while the other thread cleans up and ends the process."""
    while not (_instead or _drains):
        time.sleep(1)


def _terminate(*_: object) -> None:
    """Tells the other thread of SIGTERM, which a prompt's own handling of signals hides from it, and holds the main thread."""
    if _drains:  # a server has no prompt, and continues
        return
    _wakeup[1].send(bytes([signal.SIGTERM]))
    while True:
        time.sleep(1)


def _watch() -> None:
    """Waits for signals. Ctrl-C calls the last action of `instead_of_ending`, if any; otherwise the process ends."""
    drained = False
    while True:
        signals = _wakeup[0].recv(64)
        if _drains and not drained:
            drained = True
            _drains[-1]()
        elif signal.SIGTERM in signals:
            _end(signal.SIGTERM)
        elif signal.SIGINT in signals and _instead:
            _instead[-1]()
        elif signal.SIGINT in signals:
            _end(signal.SIGINT)


def _end(number: signal.Signals) -> NoReturn:
    """Ends the process as a signal asks, with the terminal as it was when the command began."""
    line, status = ENDINGS[number]
    tokenizer_errors.show_stderr()
    # A progress bar hides the cursor, and a prompt has the terminal mark pasted text.
    _complain(("\x1b[?25h\x1b[?2004l" if sys.stderr.isatty() else "") + f"\n{line}")
    remove_unfinished(seconds=REMOVE_S)
    with contextlib.suppress(OSError, termios.error):
        if _terminal and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp():  # in the background the system would stop it
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, _terminal[0])
    os._exit(status)


def _complain(line: str) -> None:
    """Prints a line on stderr."""
    with contextlib.suppress(OSError, AttributeError):  # stderr may be full or closed as well
        print(line, file=sys.stderr, flush=True)


def _discard_output() -> None:
    """Points stdout at /dev/null: Python would report an error when it flushes stdout at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
