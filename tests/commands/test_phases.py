"""What a command shows while it waits: lines where stderr is no terminal, "compiling" on a terminal, nothing with --quiet."""

import io
import re
import time

import pytest
from rich.console import Console

import icejax
from icejax.cache.registry import Full
from icejax.commands.terminal import phases
from icejax.commands.terminal.phases import NOTE, Phases
from tests.helpers import programs
from tests.helpers.commands import SHORT, run

ERASED = "\b" * len(NOTE) + "\x1b[K"


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(phases, "PATIENCE_S", 0.2)


def test_a_phase_that_lasts_is_told_and_its_end(impatient):
    shown = io.StringIO()
    with Phases(Console(file=shown, force_terminal=False)) as waiting:
        waiting("loading", 0, 0)
        waiting("loading", 3, 290)
        time.sleep(0.3)
        waiting("loading", 7, 290)
        time.sleep(0.7)
        waiting("compiling", 1, 0)  # ends at once: nobody is told
        waiting("prefill", 1, 30)
        time.sleep(0.3)
    lines = shown.getvalue().splitlines()
    (*loading, loaded), prefill = ([line for line in lines if line.startswith(phase)] for phase in ("loading: ", "prefill: "))
    assert loading[0] == "loading: 0 s so far, 3 of 290 tensors"
    assert len(loading) in (2, 3, 4) and loading[-1].endswith(", 7 of 290 tensors")  # at 0.2, 0.4 and 0.8 seconds
    assert float(re.fullmatch(r"loading: took (\d+\.\d) s", loaded)[1]) >= 1.0
    assert prefill[0] == "prefill: 0 s so far, 1 of 30 layers" and prefill[-1].startswith("prefill: took ")
    assert lines == [*loading, loaded, *prefill]


def test_no_line_cuts_an_answer_in_two(impatient):
    shown = io.StringIO()
    with Phases(Console(file=shown, force_terminal=False)) as waiting:
        waiting("prefill", 1, 30)
        waiting.before_text("The")
        waiting("compiling", 1, 0)
        time.sleep(0.4)
        waiting.before_text(" end")
    assert shown.getvalue() == ""


@pytest.mark.parametrize("text, width, room", [("Hello", 80, True), ("a line\nHello", 16, True), ("Hello", 15, False)])
def test_a_terminal_shows_compiling_behind_the_first_token(text, width, room):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=width)
    with Phases(console) as waiting:
        waiting("prefill", 1, 30)
        waiting.before_text(text)
        shown.truncate(0)
        shown.seek(0)
        waiting("compiling", 1, 0)
        waiting("compiling", 2, 0)
        assert shown.getvalue() == NOTE * room
        waiting.before_text("!")
        assert shown.getvalue() == (NOTE + ERASED) * room
        waiting("compiling", 3, 0)  # nobody knows in which column the text stands now
        assert shown.getvalue() == (NOTE + ERASED) * room


def test_a_terminal_shows_a_bar_of_a_warm_up():
    """Its requests are counted; a count of programs would have no bar, for nobody knows how many come."""
    shown = io.StringIO()
    with Phases(Console(file=shown, force_terminal=True, width=100)) as waiting:
        waiting("warm-up", 3, 43)
    assert "warm-up requests" in shown.getvalue() and " 3/43" in shown.getvalue()


def test_a_command_tells_of_prefill_unless_quiet(capsys, bundled, monkeypatch):
    monkeypatch.setattr("icejax.commands.generate.load", lambda *_: bundled)
    monkeypatch.setattr(phases, "PATIENCE_S", 0.0)
    status, out, err = run(capsys, "--prompt", "import os", "--cache", "full", "--json", *SHORT)
    lines = err.splitlines()
    assert status == 0 and any(re.fullmatch(r"prefill: 0 s so far, \d of 4 layers", line) for line in lines)
    phases_told = [{line.partition(":")[0] for line in lines if word in line} for word in (" s so far", ": took ")]
    assert phases_told[0] == phases_told[1]
    quiet = run(capsys, "--prompt", "import os", "--cache", "full", "--json", "--quiet", *SHORT)
    assert quiet[0] == 0 and quiet[2] == ""


@pytest.mark.slow
def test_the_api_tells_of_loading_compiling_and_prefill():
    calls = []
    model, tokenizer = icejax.load(progress=lambda *call: calls.append(call))
    assert calls[0] == ("loading", 0, 0) and [call[1] for call in calls[1:]] == [*range(1, calls[-1][2] + 1)]
    calls.clear()
    prompts = ["a", "b", "c", "d", "e"]
    programs.drop()
    icejax.generate(model, tokenizer, prompts, cache=Full(), max_new_tokens=2, progress=lambda *call: calls.append(call))
    assert [done for phase, done, total in calls if (phase, total) == ("prefill", 20)] == [*range(21)]
    compiled = [done for phase, done, total in calls if (phase, total) == ("compiling", 0)]
    assert compiled == [*range(1, len(compiled) + 1)] and len(compiled) + 21 == len(calls)
    first, last = calls.index(("prefill", 1, 20)), calls.index(("prefill", 20, 20))
    assert "compiling" in [phase for phase, *_ in calls[:first]] and "compiling" in [phase for phase, *_ in calls[last:]]
