"""The engine: one thread owns the device and answers the requests of any number of callers.

`api.engine` calls it. Callers submit jobs from their own threads and read responses from a handle; the thread alone touches
arrays, so a caller that waits, fails or goes away stops nobody else.
"""

from __future__ import annotations

import atexit
import logging
import math
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from icejax.checks.errors import InputError
from icejax.engine.decode.loop import Outcome
from icejax.engine.response import GenerationResponse, joined
from icejax.engine.serving.core import Core
from icejax.engine.serving.job import Job
from icejax.engine.serving.scheduler import Load, QueueFull, Scheduler, Ticket
from icejax.runtime import processes
from icejax.runtime.processes import LOST_LINE, GroupError

LOG = logging.getLogger(__name__)
CLOSED = "the engine is closed: start another one"
Piece = Outcome | RuntimeError | None  # what a handle's reader gets; None: the request was cancelled


class Handle:
    """A request that an engine answers: iterate over it for the pieces of the answer, or take the whole `result`.

    Each iteration begins with the first piece, and any thread may read. A handle holds at most one piece per answer token.

    Attributes:
        engine: the caller's engine, which lives as long as a handle of it.
    """

    engine: Any = None

    def __init__(self, cancel: Callable[[Handle], None], answers: int) -> None:
        self._pieces: list[Piece] = []
        self._listener: Callable[[Piece], None] | None = None
        self._grown, self._cancel, self._answers = threading.Condition(), cancel, answers

    def __iter__(self) -> Iterator[GenerationResponse]:
        """Yields the pieces of the answers; ends early if the request was cancelled.

        Raises:
            InputError: the pool can never hold the request, too many wait, or the logits are not finite.
            RuntimeError: the engine failed or was closed; the error of a failure is its cause.
        """
        count, answers_left = 0, self._answers
        while answers_left:
            piece, count = self._piece(count), count + 1
            if isinstance(piece, BaseException):
                raise piece
            if piece is None:
                return
            answers_left -= piece.finish_reason is not None
            yield piece

    def _piece(self, number: int) -> Piece:
        """Waits for a piece, and returns it."""
        with self._grown:
            self._grown.wait_for(lambda: len(self._pieces) > number)
            return self._pieces[number]

    def results(self) -> list[GenerationResponse]:
        """Returns the whole answers, without those that were cancelled before their first token; errors as in the iteration."""
        return joined(self)

    def result(self) -> GenerationResponse:
        """Returns the whole answer, the first if there are several; errors are those of the iteration.

        Raises:
            InputError: the request was cancelled before its first token.
        """
        answers = self.results()
        if not answers:
            raise InputError("the request was cancelled before its first token: it has no answer")
        return answers[0]

    def cancel(self) -> None:
        """Ends the request wherever it is: in the queue, in prefill or between tokens. A request that is over stays so."""
        self._cancel(self)

    def listen(self, listener: Callable[[Piece], None]) -> None:
        """Calls `listener` with every piece, from the first on: now with those that are there, then in the engine's thread.

        A piece may also be the error that ends the request, or None, the end of a cancelled one. The listener must return at
        once and raise nothing: all requests wait for it. A handle has one listener.
        """
        with self._grown:
            for piece in self._pieces:
                listener(piece)
            self._listener = listener

    def put(self, piece: Piece) -> None:
        """Takes the next piece, an error, or None for the end of a cancelled request; the engine's thread calls it."""
        with self._grown:
            self._pieces.append(piece)
            self._grown.notify_all()
            if self._listener is not None:
                self._listener(piece)


class EngineThread:
    """Drives a core in a thread of its own, until it is closed or the core fails.

    Attributes:
        constants: those of the core.
        sizes: numbers of places that a step may compute, ascending.
    """

    def __init__(self, make_core: Callable[[], Core], *, most_waiting: int | None = None) -> None:
        """Starts the thread, which makes the core; raises what that raises.

        Args:
            most_waiting: most answers that the thread has not looked at yet; the core counts the others. None: any number.
        """
        self._most_waiting = most_waiting
        self._changed = threading.Condition()
        self._new: deque[tuple[Handle, Sequence[Job]]] = deque()
        self._cancelled: deque[Handle] = deque()
        self._compiles: deque[tuple[int, queue.SimpleQueue[BaseException | None]]] = deque()  # calls of `compile_for`
        self._tickets: dict[Handle, list[Ticket]] = {}  # that are not over
        self._closes = False
        self._failure: BaseException | None = None
        self._ends_with: BaseException | None = None
        self._scheduler: Scheduler | None = None  # of the core, while it works
        self._started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(make_core,), name="icejax-engine", daemon=True)
        self._thread.start()
        if (error := self._started.get()) is not None:
            raise error
        atexit.register(self.close)  # an interpreter that ends under a running program may crash

    def submit(self, jobs: Sequence[Job]) -> Handle:
        """Puts the jobs of one request at the end of the queue.

        Raises:
            InputError: too many answers wait, or the request asks for more than can ever be there at once.
            RuntimeError: the engine is closed, or has failed.
        """
        handle = Handle(self._cancel, len(jobs))
        with self._changed:
            if self._closes:
                raise self._error()
            most = math.inf if self._most_waiting is None else self.sizes[-1] + self._most_waiting
            if len(jobs) > most:
                raise InputError(f"the request asks for {len(jobs)} answers and the engine takes {most}: ask for fewer")
            if sum(len(others) for _, others in self._new) >= most:
                raise QueueFull(self._most_waiting)
            self._new.append((handle, jobs))
            self._changed.notify()
        return handle

    def compile_for(self, size: int) -> None:
        """Calls `Core.compile_for` as soon as no request runs; RuntimeError if the engine ends before."""
        ended = queue.SimpleQueue()
        with self._changed:
            if self._closes:
                raise self._error()
            self._compiles.append((size, ended))
            self._changed.notify()
        if (error := ended.get()) is not None:
            raise error

    @property
    def load(self) -> Load:
        """How busy the core is; any thread may ask."""
        scheduler = self._scheduler
        return Load() if scheduler is None else scheduler.load()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the thread; None: it has not failed."""
        return self._failure

    def end_with(self, error: BaseException) -> None:
        """Fails with an error before the next piece of work; any thread may call it."""
        with self._changed:
            self._ends_with = error
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread after the present piece of work; requests that are not over fail."""
        with self._changed:
            self._closes = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:  # which may collect an engine that nobody holds
            self._thread.join()
        atexit.unregister(self.close)

    def _cancel(self, handle: Handle) -> None:
        with self._changed:
            self._cancelled.append(handle)
            self._changed.notify()

    def _error(self) -> RuntimeError:
        """Returns the error of a caller whose request is not answered."""
        error = RuntimeError(CLOSED if self._failure is None else f"the engine has failed: {self._failure}")
        error.__cause__ = self._failure
        return error

    def _run(self, make_core: Callable[[], Core]) -> None:
        failure = None
        try:
            core = make_core()
        except BaseException as error:
            self._started.put(error)
            return
        self._scheduler, self.constants, self.sizes = core.scheduler, core.constants, core.scheduler.sizes
        self._started.put(None)
        try:
            with processes.watched():
                self._drive(core)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold the core's arrays
            failure = GroupError(LOST_LINE) if processes.count() > 1 and processes.is_loss(error) else error
            LOG.error("the engine has failed: %s", failure)
        core.close()
        self._scheduler = None
        del core
        with self._changed:
            self._closes, self._failure = True, failure
            handles = [*self._tickets, *(handle for handle, _ in self._new)]
            self._tickets.clear()
            self._new.clear()  # a handle holds the engine
            for _, ended in self._compiles:
                ended.put(self._error())
        atexit.unregister(self.close)
        for handle in handles:
            handle.put(self._error())

    def _drive(self, core: Core) -> None:
        """Works until the engine closes."""
        while self._take_changes(core):
            self._work(core)  # a function of its own: what this thread names while it waits is not collected

    def _work(self, core: Core) -> None:
        """Does one piece of work, and hands the outcomes to the handles."""
        failed = dict[Handle, InputError]()
        for ticket, outcome in core.step():
            handle = ticket.owner
            if handle in failed:
                continue
            if isinstance(outcome, InputError):
                failed[handle] = outcome
                continue
            handle.put(outcome)
            if outcome.finish_reason is not None:
                self._tickets[handle].remove(ticket)
                if not self._tickets[handle]:
                    del self._tickets[handle]
        for handle, error in failed.items():  # after the piece of work, which other processes of a group do as a whole
            self._drop(core, handle)
            handle.put(error)

    def _take_changes(self, core: Core) -> bool:
        """Waits until there is something to do, and hands what callers asked for to the core; False: the engine closes."""
        with self._changed, processes.at_rest():
            self._changed.wait_for(lambda: core.busy or self._is_called)
            if self._ends_with is not None:
                raise self._ends_with
            new, cancelled, closes = [*self._new], [*self._cancelled], self._closes
            self._new.clear()
            self._cancelled.clear()
            self._tickets |= {handle: [] for handle, _ in new}  # all at once: each hears of a core that fails
        for handle, jobs in new:
            try:
                for job in jobs:
                    self._tickets[handle].append(core.submit(job, owner=handle))
            except InputError as error:
                self._drop(core, handle)
                handle.put(error)
        for handle in cancelled:
            if self._drop(core, handle):
                handle.put(None)
        if self._compiles and not core.busy and not closes:
            core.compile_for(self._compiles[0][0])
            self._compiles.popleft()[1].put(None)
        return not closes

    @property
    def _is_called(self) -> bool:
        """Whether a caller waits for the thread."""
        return bool(self._new or self._cancelled or self._compiles or self._closes or self._ends_with)

    def _drop(self, core: Core, handle: Handle) -> bool:
        """Takes a request out of the core; False if it is over already."""
        tickets = self._tickets.get(handle, ())
        for ticket in tickets:
            core.release(ticket)
        self._tickets.pop(handle, None)  # last: it hears of a core that fails
        return bool(tickets)
