"""The scheduler decides which request gets a place in the batch, and the engine's next work; it knows no device, no clock.

The core calls it, with the seconds that each piece of work took. Admission is first come, first served: a request waits until
a place is free and the pool has extents for its prompt and its whole answer. Nothing is ever preempted.

Example: a prompt is prefilled in 10 units of 150 ms while other rows decode in steps of 50 ms, at a share of 0.7. After each
unit come one or two steps, so that 70% of the time is prefill.

A step computes the first `size` places. Example: 5 of 8 places are used, so steps compute 8. Two rows end; after 8 more steps
the three others move to the places 0, 1 and 2, and steps compute 4.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from icejax.cache.pool.extents import Extents
from icejax.checks.errors import InputError

SMALLER_AFTER = 8  # steps for which a smaller size must be enough: moving the rows takes about as long as a few steps


class Work(enum.Enum):
    """The engine's next piece of work."""

    PREFILL = "a unit of prefill"
    DECODE = "a decode step"
    NOTHING = "nothing"


class QueueFull(InputError):
    """Raised for a request that finds as many others in the queue as may wait; later there is room again."""

    def __init__(self, most_waiting: int) -> None:
        super().__init__(f"{most_waiting} requests wait already, as many as may: try again later")


@dataclass(eq=False)
class Ticket:
    """A request on its way: it waits, is prefilled, decodes, and is over.

    Attributes:
        request: what the engine prefills and decodes; the scheduler does not look at it, nor at the owner.
        wanted: bool[X], the extents that its row needs for itself; None without a pool.
        shared: i32[X], extents of a cached prefix that it reads too.
        route: how its prompt gets into a cache; set by `prepare`.
        owner: who gets the responses.
        at: its place in the batch; None before it decodes, and when it is over.
        table: i32[X], the extents that its row has; None without a pool, while it waits, and when it is over.
    """

    request: Any
    wanted: np.ndarray | None = None
    shared: np.ndarray | None = None
    route: Any = None
    owner: Any = None
    at: int | None = None
    table: np.ndarray | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy an engine is.

    Attributes:
        running: requests that are prefilled or decode; each of several answers to a prompt counts.
        waiting: requests without a place.
        used: share of the extents that running requests have; without a pool, of the places.
        free_extents: extents of the pool that neither a request nor a cached prefix has; without a pool 0.
        works: pieces of work since the start.
    """

    running: int = 0
    waiting: int = 0
    used: float = 0.0
    free_extents: int = 0
    works: int = 0


class Scheduler:
    """The queue of a batch.

    Attributes:
        waiting: tickets without a place, in the order in which they came.
        prefilling: the ticket whose prompt is being prefilled; None: no prompt is.
        decoding: the tickets that decode, by place.
        extents: the pool's extents; None without a pool.
        sizes: numbers of places that a step may compute, ascending.
        size: how many a step computes now, the first ones.
        least: the smallest size that steps may have, for a warm-up.
    """

    def __init__(
        self,
        places: int,
        extents: Extents | None,
        *,
        smaller: Sequence[int] = (),
        share: float = 1.0,
        most_waiting: int | None = None,
        prepare: Callable[[Ticket], None] | None = None,
    ) -> None:
        """Begins with an empty queue.

        Args:
            places: rows that decode at once.
            smaller: smaller numbers of places that a step may compute, ascending.
            share: most of the time that prefill may take while other rows decode, above 0; 1: a prompt is prefilled whole
                before the next step, so that the order of all work depends on the requests alone.
            most_waiting: most tickets that may wait beyond those for which a place is free; None: any number.
            prepare: called with the first ticket that waits when a place is free: it sets `wanted` and `shared` again, and may
                free extents.
        """
        self.waiting, self.prefilling, self.decoding = deque[Ticket](), None, dict[int, Ticket]()
        self.extents, self._share, self._most_waiting, self._prepare = extents, share, most_waiting, prepare
        self._capacity = 0 if extents is None else extents.free
        # share x seconds of steps - (1 - share) x seconds of units that delayed rows; below 0 the next unit waits for steps.
        self._credit, self._delays_rows = 0.0, False
        self._newest, self._works, self._places = Work.NOTHING, 0, places
        self.sizes = *smaller, places
        self.size = self.least = self.sizes[0]
        self._spare = 0  # steps since the rows needed more than the next smaller size

    @property
    def busy(self) -> bool:
        """Whether any ticket waits or runs."""
        return bool(self.waiting or self.prefilling or self.decoding)

    def submit(self, ticket: Ticket) -> None:
        """Puts a ticket at the end of the queue.

        Raises:
            InputError: too many tickets wait, or the pool can never hold the row.
        """
        free = self._places - len(self.decoding) - (self.prefilling is not None)
        if self._most_waiting is not None and len(self.waiting) >= free + self._most_waiting:
            raise QueueFull(self._most_waiting)
        if ticket.wanted is not None and ticket.wanted.sum() > self._capacity:
            raise InputError(
                f"the request needs {ticket.wanted.sum()} extents of host memory and the pool has {self._capacity}: "
                "shorten it, or give the engine more host memory"
            )
        self.waiting.append(ticket)

    def next(self) -> Work:
        """Returns what to do now; gives the first ticket that waits a place if there is one for it."""
        if self.prefilling is None:
            self._admit()
        if self.prefilling is None:
            return Work.DECODE if self.decoding else Work.NOTHING
        self._delays_rows = bool(self.decoding)
        if not self.decoding or self._share == 1:
            return Work.PREFILL
        may_prefill = self._newest is Work.DECODE and self._credit >= 0
        return Work.PREFILL if may_prefill else Work.DECODE

    def ran(self, work: Work, seconds: float) -> None:
        """Counts the time that a piece of work took, which `next` returned."""
        self._newest = work
        self._works += 1
        if work is Work.DECODE:
            self._credit += self._share * seconds
            if self.prefilling is None:  # steps without a prompt to prefill pay for past units, not for later ones
                self._credit = min(self._credit, 0.0)
        elif self._delays_rows:
            self._credit -= (1 - self._share) * seconds

    def load(self) -> Load:
        """Returns how busy the batch is; another thread may call it between any two operations of the engine's."""
        prefilling = self.prefilling
        running = [*self.decoding.values(), *([] if prefilling is None else [prefilling])]  # one copy: the dict may change
        used, free = len(running) / self._places, 0
        if self.extents is not None:
            used, free = sum(int(ticket.wanted.sum()) for ticket in running) / self._capacity, self.extents.free
        return Load(running=len(running), waiting=len(self.waiting), used=used, free_extents=free, works=self._works)

    def prefilled(self) -> Ticket:
        """Gives the prefilled ticket the first free place, and returns it; `size` grows if it has to."""
        ticket, self.prefilling = self.prefilling, None
        if not self.decoding:  # a batch begins
            self.size = self.least
        ticket.at = next(at for at in range(self._places) if at not in self.decoding)
        self.decoding[ticket.at] = ticket
        self.size = next(size for size in self.sizes if size >= max(self.size, ticket.at + 1))
        return ticket

    def shrink(self) -> list[int] | None:
        """Called before a step: gives it the next smaller size if that has been enough for some steps.

        Returns:
            The places that the rows had, in the order of their new ones from 0 on; None: nothing changes.
        """
        smaller = max((size for size in self.sizes if self.least <= size < self.size), default=0)
        needed = len(self.decoding) + len(self.waiting) + (self.prefilling is not None)
        self._spare = self._spare + 1 if needed <= smaller else 0
        if self._spare < SMALLER_AFTER:
            return None
        places = sorted(self.decoding)
        self.decoding = {at: self.decoding[old] for at, old in enumerate(places)}
        for at, ticket in self.decoding.items():
            ticket.at = at
        self.size, self._spare = smaller, 0
        return places

    def release(self, ticket: Ticket) -> None:
        """Takes a ticket out, wherever it is, with its place and its extents; a ticket that is out stays out."""
        if ticket in self.waiting:
            self.waiting.remove(ticket)
        if ticket is self.prefilling:
            self.prefilling = None
        self.decoding.pop(ticket.at, None)
        if ticket.table is not None:
            self.extents.give_back(ticket.table)
        ticket.at = ticket.table = None

    def _admit(self) -> None:
        if not self.waiting or len(self.decoding) == self._places:
            return
        ticket = self.waiting[0]
        if self._prepare is not None:
            self._prepare(ticket)
        if ticket.wanted is not None:
            if ticket.wanted.sum() > self.extents.free:
                return
            ticket.table = self.extents.take(ticket.wanted)
            if ticket.shared is not None:
                self.extents.share(ticket.shared)
                ticket.table = np.where(ticket.wanted, ticket.table, ticket.shared)
        self.waiting.popleft()
        self.prefilling = ticket
