"""The progress that a command shows: bars on a terminal, elsewhere a line for a long phase, and one for its end.

The commands that load and answer pass a `Phases` as the `progress` of the API.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from icejax.runtime.compile_clock import clock
from icejax.runtime.progress import COMPILING, LOADING, MEASURING, PREFILL, WARM_UP

PATIENCE_S = 2.0  # seconds that a phase lasts before its first line
UNITS = {LOADING: "tensors", PREFILL: "layers", COMPILING: "programs", MEASURING: "runs", WARM_UP: "requests"}
NOTE = " compiling"  # stands after the first token on a terminal while the program of the others is compiled


class Speed(ProgressColumn):
    """A column of the progress bar: steps per second, or "compiling" while JAX compiles."""

    def render(self, task: Task) -> Text:
        if clock().busy:
            return Text("compiling")
        return Text(f"{task.speed:.1f}/s" if task.speed else "")


def progress(console: Console, *, quiet: bool = False) -> Progress:
    """Returns progress bars with speed and time left; they are shown on a terminal only."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Speed(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)


class Phases:
    """Shows the phases of a call, whose `progress` it is; used as a context, whose end ends the last phase.

    On a terminal a phase is a bar. Elsewhere a phase that has lasted `PATIENCE_S` seconds gets a line, another each time
    that its duration has doubled, and one at its end. Once an answer's text is written (`before_text`), no line comes
    between its pieces.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self.console, self._quiet, self._bars = console, quiet, progress(console, quiet=quiet)
        self._lock = threading.Lock()  # a line comes from the thread of a timer
        self._phase, self._done, self._total, self._started = "", 0, 0, 0.0
        self._timer: threading.Timer | None = None
        self._task: Any = None
        self._told = self._writing = self._note_fits = self._noted = False

    def __enter__(self) -> Phases:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Takes a step of a phase; another phase than before ends that one."""
        if self._quiet:
            return
        if self._writing:
            if phase == COMPILING and self._note_fits and not self._noted:
                self._write(NOTE)
                self._noted = True
            return
        if self.console.is_terminal:
            self._move_bar(phase, done, total)
            return
        with self._lock:
            if phase != self._phase:
                self._end()
                self._phase, self._started = phase, time.monotonic()
                if phase in UNITS:
                    self._tell_after(PATIENCE_S)
            self._done, self._total = done, total

    def stop(self) -> None:
        """Removes bars, and ends the last phase."""
        self._bars.stop()
        with self._lock:
            self._end()
        if self._noted:
            self._write("\b" * len(NOTE) + "\x1b[K")
            self._noted = False

    def before_text(self, text: str) -> None:
        """Takes away what stands where an answer's next `text` will; a terminal shows "compiling" after the first text."""
        first, self._writing = not self._writing, True
        if first or self._noted:
            self.stop()
        width = cell_len(text.rpartition("\n")[2]) + len(NOTE)
        self._note_fits = first and self.console.is_terminal and width < self.console.width  # it stays on the text's line

    def _move_bar(self, phase: str, done: int, total: int) -> None:
        if phase == COMPILING:  # the bar of the phase that compiles says so
            return
        if phase != self._phase:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._phase, self._task = phase, self._bars.add_task(f"{phase} {UNITS.get(phase, '')}".rstrip(), total=None)
        self._bars.update(self._task, completed=done, total=total or None)

    def _tell_after(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._tell)
        self._timer.daemon = True
        self._timer.start()

    def _tell(self) -> None:
        """Tells of the phase that lasts; the timer calls it."""
        with self._lock:
            if self._timer is threading.current_thread():  # else the phase has ended meanwhile
                count = f", {self._done} of {self._total} {UNITS[self._phase]}" if self._total else ""
                seconds = time.monotonic() - self._started
                self._write(f"{self._phase}: {seconds:.0f} s so far{count}\n")
                self._told = True
                self._tell_after(seconds)

    def _end(self) -> None:
        """Ends the current phase, with a line if its begin had one."""
        if self._timer is not None:
            self._timer.cancel()
        if self._told:
            self._write(f"{self._phase}: took {time.monotonic() - self._started:.1f} s\n")
        self._phase, self._timer, self._told = "", None, False

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # stderr may be full or closed
            self.console.file.write(text)
            self.console.file.flush()
