"""The scheduler against a plain model of places and extents, with seconds that no clock measures."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from icejax.cache.pool.extents import SCRATCH_EXTENT, Extents
from icejax.checks.errors import InputError
from icejax.engine.serving.scheduler import Load, Scheduler, Ticket, Work

SECONDS = st.sampled_from((0.01, 0.05, 0.15, 1.0))
EXTENTS = 6  # of a row


def ticket(extents: int | None = None) -> Ticket:
    return Ticket("a request", None if extents is None else np.arange(EXTENTS) < extents)


def drain(scheduler: Scheduler, *, units: int, steps: int, unit: float = 0.15, step: float = 0.05) -> list[Work]:
    """Does all work: a prompt has `units` units, a row ends after `steps` steps. Returns the pieces of work in order."""
    pieces, units_left, steps_left = [], {}, {}
    while (work := scheduler.next()) is not Work.NOTHING:
        pieces.append(work)
        if work is Work.PREFILL:
            current = scheduler.prefilling
            units_left[current] = units_left.get(current, units) - 1
            if not units_left[current]:
                steps_left[scheduler.prefilled()] = steps
        else:
            for row in [*scheduler.decoding.values()]:
                steps_left[row] -= 1
                if not steps_left[row]:
                    scheduler.release(row)
        scheduler.ran(work, unit if work is Work.PREFILL else step)
        assert len(pieces) < 10_000
    return pieces


class SchedulerMachine(RuleBasedStateMachine):
    """Submits, works and releases at random.

    Its model: `waiting` in order, `prefilling`, `decoding` as sets of tickets, and the excess of prefill's time.
    """

    @initialize(
        places=st.integers(1, 3),
        extents=st.none() | st.integers(3, 9),
        share=st.sampled_from((0.05, 0.5, 0.7, 1.0)),
        most_waiting=st.none() | st.integers(1, 4),
    )
    def begin(self, places, extents, share, most_waiting):
        self.pool = None if extents is None else Extents(extents + 1)
        self.places, self.capacity, self.share, self.most_waiting = places, extents, share, most_waiting
        smaller = [size for size in (1, 2) if size < places]
        self.scheduler = Scheduler(places, self.pool, smaller=smaller, share=share, most_waiting=most_waiting)
        self.waiting, self.prefilling, self.decoding, self.all = [], None, set(), []
        self.newest, self.excess, self.longest = Work.NOTHING, 0.0, 0.0

    @rule(extents=st.integers(0, EXTENTS))
    def submit(self, extents):
        new = ticket(None if self.pool is None else extents)
        open_, most = len(self.waiting) + bool(self.prefilling) + len(self.decoding), self.most_waiting
        is_full = most is not None and open_ >= self.places + most
        if is_full or (self.pool is not None and extents > self.capacity):
            with pytest.raises(InputError, match="wait already" if is_full else f"needs {extents} extents of host memory"):
                self.scheduler.submit(new)
        else:
            self.scheduler.submit(new)
            self.waiting.append(new)
        self.all.append(new)

    @rule(seconds=SECONDS, is_last=st.booleans(), ends=st.sets(st.integers(0, 2)))
    def work(self, seconds, is_last, ends):
        work, before = self.scheduler.next(), bool(self.decoding)
        self.admit()
        if self.share == 1:  # then the order does not depend on time
            assert work is (Work.PREFILL if self.prefilling else Work.DECODE if self.decoding else Work.NOTHING)
        if work is Work.NOTHING:
            assert not self.decoding and self.prefilling is None and not self.waiting
            return
        if work is Work.PREFILL:
            assert self.share == 1 or not self.decoding or self.newest is Work.DECODE
            if is_last:
                first = min({*range(self.places)} - {row.at for row in self.decoding})
                assert self.scheduler.prefilled() is self.prefilling and self.prefilling.at == first
                self.decoding.add(self.prefilling)
                self.prefilling = None
        else:
            assert self.decoding
            self.scheduler.shrink()
            for row in [row for row in self.decoding if row.at in ends]:
                self.release(row)
        self.scheduler.ran(work, seconds)
        self.newest = work
        self.count(work, seconds, before)

    def admit(self):
        """The first ticket that waits has a place if there is one, and its extents."""
        if self.prefilling is None and self.waiting and len(self.decoding) < self.places:
            first = self.waiting[0]
            if first.wanted is None or self.used() + first.wanted.sum() <= self.capacity:
                self.prefilling = self.waiting.pop(0)

    def count(self, work, seconds, before):
        """Prefill has at most its share of every stretch of time that begins with rows alone, and a unit more."""
        if work is Work.DECODE:
            self.excess -= self.share * seconds
            if self.prefilling is None:
                self.excess = max(self.excess, 0.0)
        elif before:
            self.excess, self.longest = self.excess + (1 - self.share) * seconds, max(self.longest, seconds)
        assert self.share == 1 or self.excess <= (1 - self.share) * self.longest + 1e-9

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def cancel(self, data):
        """In any state, and also a ticket that was refused or is over."""
        self.release(data.draw(st.sampled_from(self.all)))

    def release(self, row):
        self.scheduler.release(row)
        if row in self.waiting:
            self.waiting.remove(row)
        self.prefilling = None if row is self.prefilling else self.prefilling
        self.decoding.discard(row)

    def used(self):
        return sum(int(row.wanted.sum()) for row in self.running() if row.wanted is not None)

    def running(self):
        return [*self.decoding, *([] if self.prefilling is None else [self.prefilling])]

    @invariant()
    def every_owner_is_alone(self):
        scheduler, running = self.scheduler, self.running()
        assert [*scheduler.waiting] == self.waiting and scheduler.prefilling is self.prefilling
        assert scheduler.decoding == {row.at: row for row in self.decoding}
        assert scheduler.busy == bool(self.waiting or running)
        assert scheduler.size in scheduler.sizes and {*scheduler.decoding} <= {*range(scheduler.size)}
        assert all(row.at is None for row in self.all if row not in self.decoding)
        assert all(row.table is None for row in self.all if row not in running)
        if self.pool is None:
            return
        owned = np.concatenate([np.zeros(0, int), *(row.table[row.wanted] for row in running)])
        assert len({*owned.tolist()}) == len(owned) and SCRATCH_EXTENT not in owned
        assert all((row.table[~row.wanted] == SCRATCH_EXTENT).all() for row in running)
        assert self.pool.free == self.capacity - len(owned)

    def teardown(self):
        """All that is left ends, and everything is free."""
        if not hasattr(self, "scheduler"):
            return
        for row in [*self.decoding]:
            self.release(row)
        assert drain(self.scheduler, units=2, steps=3).count(Work.PREFILL) == 2 * len(self.waiting) + 2 * bool(self.prefilling)
        assert not self.scheduler.busy and (self.pool is None or self.pool.free == self.capacity)


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_places_and_extents_have_one_owner = SchedulerMachine.TestCase


@pytest.mark.slow
def test_places_and_extents_have_one_owner_for_long():
    many = settings(max_examples=500, stateful_step_count=60, deadline=None)
    run_state_machine_as_test(SchedulerMachine, settings=many)


def test_units_and_steps_take_turns_at_their_share():
    """Units of 150 ms, steps of 50 ms: at a share of 0.7 there are 9 steps for 7 units."""
    scheduler = Scheduler(2, None, share=0.7)
    row, prompt = ticket(), ticket()
    scheduler.submit(row)
    assert scheduler.next() is Work.PREFILL
    scheduler.prefilled()
    scheduler.ran(Work.PREFILL, 0.15)
    scheduler.submit(prompt)
    pieces = []
    for _ in range(1000):
        pieces.append(scheduler.next())
        scheduler.ran(pieces[-1], 0.15 if pieces[-1] is Work.PREFILL else 0.05)
    units = np.asarray([piece is Work.PREFILL for piece in pieces])
    assert not (units[1:] & units[:-1]).any() and not units[0]
    assert abs(units.sum() * 0.15 / (units.sum() * 0.15 + (~units).sum() * 0.05) - 0.7) < 0.002


def test_prompts_of_one_unit_do_not_stop_the_rows_that_decode():
    """The share holds over prompts that follow one another, and a step stands between the last unit and the next first one."""
    scheduler = Scheduler(3, None, share=0.5)
    row = ticket()
    scheduler.submit(row)
    scheduler.next()
    scheduler.prefilled()
    scheduler.ran(Work.PREFILL, 1.0)
    spent = {Work.PREFILL: 0.0, Work.DECODE: 0.0}
    for i in range(300):
        scheduler.submit(ticket())
        work = scheduler.next()
        seconds = 1.0 if work is Work.PREFILL else 0.25
        if work is Work.PREFILL:
            scheduler.release(scheduler.prefilled())
        scheduler.ran(work, seconds)
        spent[work] += seconds
        assert spent[Work.PREFILL] <= 0.5 * sum(spent.values()) + 0.5 + 1e-9, i
    assert spent[Work.PREFILL] > 0.45 * sum(spent.values())


def test_steps_without_a_prompt_save_no_time_for_later_prompts():
    scheduler = Scheduler(2, None, share=0.5)
    scheduler.submit(ticket())
    scheduler.next()
    scheduler.prefilled()
    for _ in range(100):
        assert scheduler.next() is Work.DECODE
        scheduler.ran(Work.DECODE, 1.0)
    scheduler.submit(ticket())
    pieces = []
    for _ in range(20):
        pieces.append(scheduler.next())
        scheduler.ran(pieces[-1], 2.0 if pieces[-1] is Work.PREFILL else 1.0)
    assert pieces == ([Work.PREFILL] + [Work.DECODE] * 2) * 6 + [Work.PREFILL, Work.DECODE]


def decoding(scheduler: Scheduler, count: int) -> list[Ticket]:
    """Returns `count` more tickets that decode."""
    rows = []
    for _ in range(count):
        scheduler.submit(ticket())
        scheduler.next()
        rows.append(scheduler.prefilled())
        scheduler.ran(Work.PREFILL, 0.1)
    return rows


def test_steps_compute_the_places_that_are_used():
    scheduler = Scheduler(6, None, smaller=(1, 2, 4))
    rows, sizes = [], []
    for _ in range(5):
        rows += decoding(scheduler, 1)
        sizes.append(scheduler.size)
    assert sizes == [1, 2, 4, 4, 6] and [row.at for row in rows] == [0, 1, 2, 3, 4]
    for row in rows[:2]:
        scheduler.release(row)
    assert [scheduler.shrink() for _ in range(8)] == [None] * 7 + [[2, 3, 4]]
    assert scheduler.size == 4 and scheduler.decoding == dict(enumerate(rows[2:])) and [row.at for row in rows[2:]] == [0, 1, 2]
    scheduler.release(rows[2])
    waiting = ticket()
    scheduler.submit(waiting)  # and will need a place
    assert [scheduler.shrink() for _ in range(20)] == [None] * 20
    scheduler.release(waiting)
    assert [scheduler.shrink() for _ in range(8)] == [None] * 7 + [[1, 2]]
    rows += decoding(scheduler, 1)
    assert scheduler.size == 4 and rows[-1].at == 2
    for row in rows:
        scheduler.release(row)
    scheduler.least = 2
    (row,) = decoding(scheduler, 1)
    assert scheduler.size == 2 and [scheduler.shrink() for _ in range(20)] == [None] * 20
    scheduler.release(row)
    scheduler.least = 1
    decoding(scheduler, 1)
    assert scheduler.size == 1


def test_a_long_prompt_at_the_head_is_not_passed_by():
    """It waits for all extents while shorter prompts that came later wait behind it."""
    scheduler = Scheduler(4, Extents(7))
    first, long, short = ticket(2), ticket(6), ticket(1)
    for one in (first, long, short):
        scheduler.submit(one)
    for _ in range(5):
        work = scheduler.next()
        if work is Work.PREFILL:
            assert scheduler.prefilled() is first
        scheduler.ran(work, 0.1)
    assert [*scheduler.waiting] == [long, short]
    scheduler.release(first)
    assert scheduler.next() is Work.PREFILL and scheduler.prefilling is long


def test_a_whole_prompt_goes_first_at_a_share_of_one():
    scheduler = Scheduler(2, None, share=1.0)
    for _ in range(3):
        scheduler.submit(ticket())
    pieces = drain(scheduler, units=3, steps=2)
    prefill, decode = [Work.PREFILL] * 3, [Work.DECODE] * 2
    assert pieces == [*prefill, *prefill, *decode, *prefill, *decode]


def test_refusals_leave_nothing_behind():
    extents = Extents(5)
    scheduler = Scheduler(1, extents, most_waiting=2)
    with pytest.raises(
        InputError,
        match="the request needs 5 extents of host memory and the pool has 4: shorten it, or give the engine more host memory",
    ):
        scheduler.submit(ticket(5))
    assert not scheduler.busy and scheduler.next() is Work.NOTHING
    for _ in range(3):  # for one there is a place
        scheduler.submit(ticket(4))
    with pytest.raises(InputError, match="2 requests wait already, as many as may: try again later"):
        scheduler.submit(ticket(1))
    assert len(scheduler.waiting) == 3 and extents.free == 4
    drain(scheduler, units=1, steps=1)
    assert not scheduler.busy and extents.free == 4


def test_its_load_counts_rows_and_their_extents():
    scheduler = Scheduler(2, Extents(5))  # one is nobody's
    for extents in (1, 2, 1):
        scheduler.submit(ticket(extents))
    assert scheduler.load() == Load(waiting=3, free_extents=4)
    scheduler.next()
    assert scheduler.load() == Load(running=1, waiting=2, used=0.25, free_extents=3)
    scheduler.ran(Work.PREFILL, 0.1)
    first = scheduler.prefilled()
    scheduler.next()
    assert scheduler.load() == Load(running=2, waiting=1, used=0.75, free_extents=1, works=1)
    scheduler.release(first)
    assert scheduler.load() == Load(running=1, waiting=1, used=0.5, free_extents=2, works=1)
    without_pool = Scheduler(4, None)
    without_pool.submit(ticket())
    without_pool.next()
    assert without_pool.load() == Load(running=1, used=0.25)
