"""The engine's thread: callers come from many threads, cancel, leave and fail, over a core without a model."""

import dataclasses
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from icejax.cache.pool.extents import Extents
from icejax.checks.errors import InputError
from icejax.engine.response import GenerationResponse
from icejax.engine.serving.scheduler import Scheduler, Ticket, Work
from icejax.engine.serving.thread import EngineThread

NOTHING = dict.fromkeys(field.name for field in dataclasses.fields(GenerationResponse))


def job(name: str, *, answers: int = 1, tokens: int = 3, units: int = 2, extents: int = 2) -> list[SimpleNamespace]:
    """Returns the jobs of one request."""
    fields = dict(name=name, tokens=tokens, units=units, extents=extents)
    return [SimpleNamespace(sample=sample, **fields) for sample in range(answers)]


class FakeCore:
    """A core whose answers are the job's name and a number per token, such as `a0 a1 a2 `.

    Attributes:
        gate: set while it may work.
        fails: an error to raise in the next piece of work.
    """

    constants = None

    def __init__(self, *, most_waiting: int | None = None) -> None:
        self.scheduler = Scheduler(2, Extents(6), share=0.5, most_waiting=most_waiting)
        self.gate, self.fails, self.tokens = threading.Event(), None, {}
        self.gate.set()

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def submit(self, job, *, owner) -> Ticket:
        ticket = Ticket(job, np.arange(6) < job.extents, owner=owner)
        self.scheduler.submit(ticket)
        return ticket

    def step(self):
        self.gate.wait()
        time.sleep(1e-5)  # as a device's work does, it lets readers run
        if self.fails is not None:
            raise self.fails
        work = self.scheduler.next()
        if work is Work.PREFILL:
            self.scheduler.prefilling.request.units -= 1
            if not self.scheduler.prefilling.request.units:
                self.scheduler.prefilled()
        elif work is Work.DECODE:
            for ticket in [*self.scheduler.decoding.values()]:
                count = self.tokens[ticket] = self.tokens.get(ticket, 0) + 1
                ends = "length" if count == ticket.request.tokens else None
                text = f"{ticket.request.name}{count - 1} "
                fields = dict(row=0, sample=ticket.request.sample, text=text, token_ids=(count,), finish_reason=ends)
                yield ticket, GenerationResponse(**NOTHING | fields)
                if ends:
                    self.release(ticket)
        self.scheduler.ran(work, 0.001)

    def release(self, ticket) -> None:
        self.scheduler.release(ticket)

    def close(self) -> None:
        pass

    @property
    def is_free(self) -> bool:
        return not self.busy and self.scheduler.extents.free == 5


@pytest.fixture
def engine():
    """Returns an engine thread and its core; the thread ends with the test."""
    core = FakeCore()
    thread = EngineThread(lambda: core)
    yield thread, core
    core.gate.set()
    thread.close()
    assert not thread._thread.is_alive()


def text_of(name: str, tokens: int = 3) -> str:
    return "".join(f"{name}{i} " for i in range(tokens))


def in_threads(count: int, work) -> None:
    """Calls `work` with each thread's number; raises what a thread raised."""
    errors = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def wait_until(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_each_of_many_threads_gets_its_answer(engine):
    thread, core = engine

    def ask(number: int) -> None:
        for i in range(20):
            name = f"<{number}.{i}>"
            handle = thread.submit(job(name, tokens=1 + i % 4))
            if i % 2:
                assert "".join(piece.text for piece in handle) == text_of(name, 1 + i % 4)
            answer = handle.result()
            assert answer.text == text_of(name, 1 + i % 4) and answer.finish_reason == "length"

    in_threads(8, ask)
    wait_until(lambda: core.is_free)


def test_an_answer_may_be_read_again_and_by_several_threads(engine):
    thread, core = engine
    core.gate.clear()
    handle = thread.submit(job("a"))
    threading.Timer(0.05, core.gate.set).start()
    in_threads(3, lambda _: [piece.text for piece in handle] == ["a0 ", "a1 ", "a2 "] or pytest.fail("other pieces"))
    assert handle.result().text == handle.result().text == "a0 a1 a2 "


def test_a_listener_gets_every_piece_from_the_first_on(engine):
    thread, core = engine
    core.gate.clear()
    early, cancelled, heard = thread.submit(job("a")), thread.submit(job("b")), {"early": [], "late": [], "cancelled": []}
    early.listen(heard["early"].append)
    cancelled.listen(heard["cancelled"].append)
    cancelled.cancel()
    core.gate.set()
    assert early.result().text == text_of("a")
    early.listen(heard["late"].append)
    wait_until(lambda: heard["cancelled"][-1:] == [None] and len(heard["early"]) == 3)
    assert heard["late"] == heard["early"] == [*early] and thread.failure is None
    wait_until(lambda: thread.load.running == thread.load.waiting == 0)


def test_a_listener_hears_of_a_failure(engine):
    thread, core = engine
    heard, core.fails = [], ValueError("no memory")
    thread.submit(job("a")).listen(heard.append)
    wait_until(lambda: heard)
    assert isinstance(heard[0], RuntimeError) and thread.failure is core.fails and thread.load.works == 0


def test_a_thousand_cancels_leave_places_and_extents_free(engine):
    thread, core = engine
    counts = {"whole": 0, "cut": 0, "nothing": 0}
    lock = threading.Lock()

    def ask(number: int) -> None:
        draw = random.Random(number)
        for i in range(250):
            name = f"<{number}.{i}>"
            handle = thread.submit(job(name, tokens=draw.randint(1, 40), extents=draw.randint(1, 5)))
            pieces, moment = [], draw.randint(-1, 12)
            if moment <= 0:
                time.sleep(draw.random() * 0.001)
                handle.cancel()
            for piece in handle:
                pieces.append(piece)
                if len(pieces) == moment:
                    handle.cancel()
                    handle.cancel()
            handle.cancel()
            assert "".join(piece.text for piece in pieces) == text_of(name, len(pieces))
            kind = "nothing" if not pieces else "whole" if pieces[-1].finish_reason else "cut"
            with lock:
                counts[kind] += 1

    in_threads(4, ask)
    wait_until(lambda: core.is_free and not thread._tickets)
    assert sum(counts.values()) == 1000 and min(counts.values()) > 0, counts


def test_requests_are_cancelled_in_the_queue_and_in_prefill(engine):
    thread, core = engine
    handles = [thread.submit(job(name, units=10**9, extents=5)) for name in "abc"]
    wait_until(lambda: core.scheduler.prefilling is not None)
    for handle in handles:
        handle.cancel()
    for handle in handles:
        assert list(handle) == []
        with pytest.raises(InputError, match="the request was cancelled before its first token: it has no answer"):
            handle.result()
    wait_until(lambda: core.is_free)
    assert thread.submit(job("d")).result().text == "d0 d1 d2 "


def test_answers_to_one_prompt_come_and_end_together(engine):
    thread, core = engine
    handle = thread.submit(job("a", answers=5))
    assert [(answer.sample, answer.text) for answer in handle.results()] == [(i, "a0 a1 a2 ") for i in range(5)]
    assert handle.result().sample == 0 and len(list(handle)) == 15
    handle = thread.submit(job("b", answers=5, tokens=10**9))
    assert next(iter(handle)).text == "b0 "
    handle.cancel()
    assert {answer.sample for answer in handle.results()} <= {0, 1}
    wait_until(lambda: core.is_free and not thread._tickets)


def test_closing_ends_the_thread_and_tells_every_reader():
    core = FakeCore()
    thread = EngineThread(lambda: core)
    decodes, done = thread.submit(job("a", tokens=10**9)), thread.submit(job("b"))
    assert next(iter(decodes)).text == "a0 " and done.result().text == "b0 b1 b2 "
    prefills, waits, cancelled = (thread.submit(job(name, units=10**9)) for name in "cde")
    core.gate.clear()
    cancelled.cancel()
    late = thread.submit(job("late"))
    threading.Timer(0.05, core.gate.set).start()
    thread.close()
    assert not thread._thread.is_alive()
    for handle in (decodes, prefills, waits, late):
        with pytest.raises(RuntimeError, match="^the engine is closed: start another one$"):
            list(handle)
    assert done.result().text == "b0 b1 b2 " and list(cancelled) == []
    with pytest.raises(RuntimeError, match="^the engine is closed: start another one$"):
        thread.submit(job("later"))
    decodes.cancel()
    thread.close()


def test_a_failure_is_raised_in_every_callers_thread(engine, caplog):
    """Also at later calls; the process and another engine continue."""
    thread, core = engine
    done = thread.submit(job("a"))
    assert done.result().text == "a0 a1 a2 "
    core.gate.clear()
    handles = [thread.submit(job("b"))]
    wait_until(lambda: not thread._new)  # the thread stands before its first piece of work
    handles += [thread.submit(job("c")), thread.submit(job("d"))]
    core.fails = ZeroDivisionError("the device has no power")
    threading.Timer(0.05, core.gate.set).start()

    def read(number: int) -> None:
        with pytest.raises(RuntimeError, match="^the engine has failed: the device has no power$") as raised:
            handles[number].result()
        assert raised.value.__cause__ is core.fails

    in_threads(3, read)
    thread._thread.join()
    assert "the engine has failed: the device has no power" in caplog.text
    with pytest.raises(RuntimeError, match="^the engine has failed: the device has no power$") as raised:
        thread.submit(job("e"))
    assert raised.value.__cause__ is core.fails and done.result().text == "a0 a1 a2 "
    other = EngineThread(FakeCore)
    assert other.submit(job("f")).result().text == "f0 f1 f2 "
    other.close()


def test_an_error_that_is_no_fault_of_callers_is_a_failure(engine):
    """InputError is for what a caller asked; one from within the core is none."""
    thread, core = engine
    core.fails = InputError("row 1 of the batch is taken")
    with pytest.raises(RuntimeError, match="^the engine has failed: row 1 of the batch is taken$"):
        thread.submit(job("a")).result()


def test_an_engine_that_has_failed_frees_its_core():
    cores = [FakeCore()]
    thread, alive = EngineThread(lambda: cores[0]), weakref.ref(cores[0])
    cores[0].fails = ValueError("no")
    handle = thread.submit(job("a"))
    with pytest.raises(RuntimeError):
        handle.result()
    thread.close()
    cores.clear()
    gc.collect()
    assert alive() is None


def test_all_requests_hear_of_a_core_that_fails_between_pieces_of_work(engine):
    """While it takes one of several new requests, and while it releases a cancelled one, as in a group that loses a process."""
    thread, core = engine
    core.gate.clear()
    handles = [thread.submit(job("a"))]
    wait_until(lambda: not thread._new)  # the thread stands before its first piece of work
    handles += [thread.submit(job("b")), thread.submit(job("c"))]

    def lost(*_, **__):
        raise OSError("a process is gone")

    core.submit = lost
    core.gate.set()
    for handle in handles:
        with pytest.raises(RuntimeError, match="the engine has failed: a process is gone"):
            handle.result()


@pytest.mark.parametrize("by_caller", [True, False])
def test_a_request_whose_release_fails_hears_of_it(by_caller):
    core = FakeCore()
    thread = EngineThread(lambda: core)
    core.gate.clear()
    handle = thread.submit(job("a"))
    wait_until(lambda: not thread._new)

    def lost(ticket):
        raise OSError("a process is gone")

    core.release = lost
    if by_caller:
        handle.cancel()
    else:
        core.step = lambda: iter([(thread._tickets[handle][0], InputError("the logits are not finite"))])
    core.gate.set()
    with pytest.raises(RuntimeError, match="the engine has failed: a process is gone"):
        handle.result()
    thread.close()


def test_a_core_that_cannot_be_made_raises_at_once():
    def no_core():
        raise InputError("the host has too little memory")

    with pytest.raises(InputError, match="the host has too little memory"):
        EngineThread(no_core)
    wait_until(lambda: "icejax-engine" not in {thread.name for thread in threading.enumerate()})


def test_requests_that_the_thread_has_not_seen_count_as_waiting():
    core = FakeCore()
    thread = EngineThread(lambda: core, most_waiting=2)
    core.gate.clear()
    handles = [thread.submit(job("a"))]
    wait_until(lambda: not thread._new)  # the thread stands before its first piece of work
    handles += [thread.submit(job(name)) for name in "bcde"]  # two have places
    with pytest.raises(InputError, match="2 requests wait already, as many as may: try again later"):
        thread.submit(job("f"))
    core.gate.set()
    assert [handle.result().text for handle in handles] == [text_of(name) for name in "abcde"]
    with pytest.raises(InputError, match="the request asks for 5 answers and the engine takes 4: ask for fewer"):
        thread.submit(job("g", answers=5))
    thread.close()


def test_a_handle_that_nobody_reads_stops_nobody(engine):
    thread, core = engine
    unread = thread.submit(job("a", tokens=500))
    for i in range(20):
        assert thread.submit(job(f"b{i}-")).result().text == text_of(f"b{i}-")
    assert sum(1 for _ in unread) == 500
    wait_until(lambda: core.is_free)


def test_a_full_queue_refuses_in_the_callers_thread():
    core = FakeCore(most_waiting=2)
    thread = EngineThread(lambda: core)
    core.gate.clear()
    first = thread.submit(job("a"))
    wait_until(lambda: not thread._new)  # the thread stands before its first piece of work
    handles = [thread.submit(job(name)) for name in "bcde"]  # the first one has a place, and one of these
    core.gate.set()
    assert first.result().text == "a0 a1 a2 "
    results = []
    for handle in handles:
        try:
            results.append(handle.result().text)
        except InputError as error:
            results.append(str(error))
    assert results.count("2 requests wait already, as many as may: try again later") == 1, results
    assert thread.submit(job("e")).result().text == "e0 e1 e2 "
    with pytest.raises(InputError, match="2 requests wait already, as many as may: try again later"):
        thread.submit(job("g", answers=6)).results()
    wait_until(lambda: core.is_free and not thread._tickets)
    too_large = thread.submit(job("f", extents=6))
    with pytest.raises(InputError, match="the request needs 6 extents of host memory and the pool has 5: shorten it"):
        too_large.result()
    thread.close()


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals come to the main thread")
def test_an_interrupt_in_a_reader_leaves_the_engine_as_it_is(engine, request):
    thread, core = engine
    # A program that a shell started in the background ignores interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    core.gate.clear()
    handle = thread.submit(job("a"))
    main = threading.get_ident()
    threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        handle.result()
    core.gate.set()
    assert handle.result().text == "a0 a1 a2 " and thread.submit(job("b")).result().text == "b0 b1 b2 "


OPEN_AT_EXIT = """
import atexit
import jax, jax.numpy as jnp
from tests.engine.test_engine_thread import EngineThread, FakeCore, job

program = jax.jit(lambda x: x @ x / 1000)

class Computing(FakeCore):
    x = jnp.ones((1000, 1000))

    def step(self):
        self.x = program(self.x)
        yield from super().step()

atexit.register(lambda: print(thread._thread.is_alive()))  # runs behind what the engine has registered later
thread = EngineThread(Computing)
handle = thread.submit(job("a", tokens=10**9))
print(next(iter(handle)).text)
"""


@pytest.mark.slow
def test_an_interpreter_ends_with_an_engine_left_open():
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    line = [sys.executable, "-c", OPEN_AT_EXIT]
    process = subprocess.run(line, capture_output=True, text=True, timeout=100, cwd=root, env=os.environ | {"PYTHONPATH": root})
    assert (process.returncode, process.stdout, process.stderr) == (0, "a0 \nFalse\n", "")
