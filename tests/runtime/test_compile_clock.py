"""The clock of seconds spent on compiling: nested events count once, and a run of a compiled program adds nothing."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from icejax.runtime import compile_clock


def test_what_lies_inside_counts_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(compile_clock.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(jax.monitoring, "register_event_duration_secs_listener", lambda _: None)
    clock, part = compile_clock.Clock(), "/jax/core/compile/part"
    for now[0], event, duration, total in (
        (10.0, part, 1.0, 1.0),
        (12.0, part, 1.0, 2.0),
        (13.0, part, 6.0, 6.0),  # from 7 to 13, which includes both earlier events
        (15.0, part, 1.0, 7.0),
        (16.0, part, 1.5, 8.0),  # from 14.5 to 16, of which 0.5 s are already counted
        (17.0, "/jax/other", 1.0, 8.0),
    ):
        clock._add(event, duration)
        assert clock.seconds == pytest.approx(total)
    assert not clock.busy
    clock._add(compile_clock.LOWERED, 0.1)
    clock._add(part, 0.1)
    assert clock.busy
    clock._add(compile_clock.ENDED, 0.2)
    assert not clock.busy


def test_a_program_is_compiled_once():
    program, x = jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x) + jnp.tan(x)), jnp.ones((17, 17))
    before, started = compile_clock.clock().seconds, time.perf_counter()
    program(x).block_until_ready()
    first, took = compile_clock.clock().seconds, time.perf_counter() - started
    assert 0 < first - before <= took
    program(x).block_until_ready()
    assert compile_clock.clock().seconds == first


def test_a_thread_is_told_of_the_programs_that_it_compiles():
    clock, told = compile_clock.clock(), []
    with clock.telling(lambda number: told.append((number, clock.busy))):
        jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x) + 3)(jnp.ones((18, 18)))
        here = len(told)
        other = threading.Thread(target=lambda: jax.jit(lambda x: jnp.sin(x) + 4)(jnp.ones((19, 19))))
        other.start()
        other.join()
    jax.jit(lambda x: jnp.sin(x) + 5)(jnp.ones((18, 18)))
    assert told == [(number, True) for number in range(1, here + 1)] and here >= 1 and not clock.busy
