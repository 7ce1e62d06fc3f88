"""The clock of seconds spent on compiling: nested events count once, and a run of a compiled program adds nothing."""

import time

import jax
import jax.numpy as jnp
import pytest

from icejax.runtime import compile_clock


def test_what_lies_inside_counts_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(compile_clock.time, "perf_counter", lambda: now[0])
    for kind in ("event", "event_duration_secs"):
        monkeypatch.setattr(jax.monitoring, f"register_{kind}_listener", lambda _: None)
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
    clock._begin("/jax/other")
    assert not clock.busy
    clock._begin(compile_clock.BEGUN)
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
