"""One engine over several processes: process 0 decides, and the others repeat the calls of its core on their devices.

What a core runs follows from its calls, in their order, and from what it decides by the clock. Process 0 sends both ahead of
the programs that they start: a request that it has accepted, one that ends early, each piece of work, and whether a prefill
continues. The other processes have cores of their own with the same plan, queue and prefix store, and run the same programs in
the same order, so that all meet in every sum. `api.engine` makes both.

    process 0             the others
    submit(job)       ->  submit(job)                a ticket with the same number
    step()            ->  step()                     the same work, and as many units of prefill
    release(ticket)   ->  release(ticket)            a request is cancelled
"""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from icejax.checks.errors import InputError
from icejax.config import ModelConfig
from icejax.engine.decode.loop import Outcome
from icejax.engine.request import AnswerOptions
from icejax.engine.sampling import Sampling
from icejax.engine.serving.core import Core
from icejax.engine.serving.job import Job
from icejax.engine.serving.scheduler import Load, Ticket
from icejax.models.decoder import CausalLM
from icejax.runtime import processes
from icejax.runtime.channel import Channel
from icejax.runtime.compile_clock import Mark
from icejax.runtime.processes import GroupError
from icejax.text.grammar.matcher import compiled
from icejax.text.grammar.rules import Grammar

SUBMIT, RELEASE, STEP, COMPILE, CLOSE = "submit", "release", "step", "compile", "close"
DIFFERENT = "this process has chosen other tokens than process 0: the group ends"


class Tickets:
    """The tickets that are not over, numbered in the order in which they came, and a sum over what they were told.

    Attributes:
        by_number: the tickets.
        sum: a checksum of all tokens and ends so far, which is the same in all processes.
    """

    def __init__(self) -> None:
        self.by_number, self._numbers, self._count, self.sum = dict[int, Ticket](), dict[Ticket, int](), 0, 0

    def add(self, ticket: Ticket) -> None:
        """Takes the next ticket."""
        self.by_number[self._count], self._numbers[ticket] = ticket, self._count
        self._count += 1

    def see(self, ticket: Ticket, outcome: Outcome) -> None:
        """Takes what a ticket is told; its end is also the ticket's."""
        told = None if isinstance(outcome, InputError) else (outcome.token_ids, outcome.finish_reason)
        self.sum = zlib.crc32(repr((self._numbers[ticket], told)).encode(), self.sum)
        if told is None or outcome.finish_reason is not None:
            self.pop(ticket)

    def pop(self, ticket: Ticket) -> int | None:
        """Forgets a ticket and returns its number; None if it is over."""
        number = self._numbers.pop(ticket, None)
        self.by_number.pop(number, None)
        return number


class LeadingCore:
    """Process 0's core, in the place of a core: it sends every call to the other processes before the call runs.

    Attributes:
        scheduler, constants: those of the core.
    """

    def __init__(self, core: Core, channel: Channel) -> None:
        self._core, self._channel, self._tickets, self._is_whole = core, channel, Tickets(), True
        self.scheduler, self.constants = core.scheduler, core.constants

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return self._core.busy

    def submit(self, job: Job, *, owner: Any = None) -> Ticket:
        """Puts a job into the queues of all processes; a job that is refused is sent to none."""
        ticket = self._core.submit(job, owner=owner)
        self._channel.agree([SUBMIT, message_of(job)])
        self._tickets.add(ticket)
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Takes a ticket out of all processes, unless it is over."""
        number = self._tickets.pop(ticket)
        if number is not None:
            with self._in_all(RELEASE, number):
                self._core.release(ticket)

    def step(self) -> Iterator[tuple[Ticket, Outcome]]:
        """Does one piece of work in all processes; yields what the core does."""
        with self._in_all(STEP, self._tickets.sum):
            for ticket, outcome in self._core.step():
                self._tickets.see(ticket, outcome)
                yield ticket, outcome

    def compile_for(self, size: int) -> None:
        """As `Core.compile_for`, in all processes."""
        with self._in_all(COMPILE, size):
            self._core.compile_for(size)

    def close(self) -> None:
        """Ends the core, and tells the other processes to; behind a call that failed they end because this process does."""
        self._core.close()
        self._channel.ends = True  # the first process that reads it may be gone before the last one has got it
        with contextlib.suppress(GroupError):
            if self._is_whole:
                self._channel.agree([CLOSE])
        self._channel.close()

    @contextlib.contextmanager
    def _in_all(self, *call: Any) -> Iterator[None]:
        """Sends a call that the block makes; should it fail, the others may wait for this process in a sum."""
        self._is_whole = False
        self._channel.agree(call)
        yield
        self._is_whole = True


class FollowingCore:
    """Another process's core, in the place of an engine's thread: `follow` runs what process 0's runs.

    Attributes:
        constants: those of the core.
        sizes: as in `EngineThread`.
        failure: None; errors are raised by `follow`.
    """

    failure = None

    def __init__(self, core: Core, channel: Channel, model: CausalLM, tokenizer: Any) -> None:
        self._core, self._channel, self._config, self._tokenizer = core, channel, model.config, tokenizer
        self.constants, self.sizes = core.constants, core.scheduler.sizes

    def follow(self) -> None:
        """Runs what process 0 sends, until its engine closes.

        Raises:
            GroupError: another process has ended, or this one computes other tokens.
        """
        tickets = Tickets()
        with processes.watched():
            while True:
                call, *values = self._channel.agree()
                if call == SUBMIT:
                    tickets.add(self._core.submit(job_of(values[0], self._tokenizer, self._config)))
                elif call == RELEASE:
                    ticket = tickets.by_number[values[0]]
                    tickets.pop(ticket)
                    self._core.release(ticket)
                elif call == STEP:
                    if values[0] != tickets.sum:
                        raise GroupError(DIFFERENT)
                    for ticket, outcome in self._core.step():
                        tickets.see(ticket, outcome)
                elif call == COMPILE:
                    self._core.compile_for(values[0])
                else:
                    return

    @property
    def load(self) -> Load:
        """How busy the core is."""
        return self._core.scheduler.load()

    def submit(self, *_: Any) -> None:
        """Raises InputError: process 0 takes the requests."""
        raise InputError("process 0 takes the requests of a group: submit there, and call engine.follow() here")

    compile_for = submit

    def close(self) -> None:
        """Ends the core; before process 0's engine has closed, this ends the group."""
        self._core.close()
        self._channel.close()


def message_of(job: Job) -> dict[str, Any]:
    """Returns a job in a form that JSON can hold, without the process's own time and place in a grammar."""
    own = {name: value for name, value in vars(job).items() if name not in ("matcher", "started")}
    grammar = None if job.grammar is None else dataclasses.asdict(job.grammar)
    return own | dict(tokens=job.tokens.tolist(), options=dataclasses.asdict(job.options), grammar=grammar)


def job_of(message: dict[str, Any], tokenizer: Any, config: ModelConfig) -> Job:
    """Returns the job of a message, which begins now.

    Raises:
        InputError: its grammar cannot be compiled here.
    """
    options, grammar, matcher = dict(message["options"]), message["grammar"], None
    options = AnswerOptions(**options | dict(sampling=Sampling(**options["sampling"])))
    tokens = np.asarray(message["tokens"], np.int32)
    if grammar is not None:
        grammar = Grammar(**grammar)
        known = dict(eos=config.eos_token_ids, vocabulary=config.vocab_size)
        matcher = compiled(grammar, tokenizer, message["tokens"], **known)
    own = dict(tokens=tokens, options=options, grammar=grammar, matcher=matcher, started=Mark.now())
    return Job(**message | own | dict(draw=tuple(message["draw"]), forced=tuple(message["forced"])))
