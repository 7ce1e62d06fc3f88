"""Help, hints for misspelt names, verbose output, and the tables and bars of the command line."""

import dataclasses
import io
import itertools
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

import icejax
from icejax.cache.policies.full import Ring
from icejax.cache.registry import Clustered, Full
from icejax.commands.terminal.phases import Speed
from icejax.commands.terminal.show import table
from icejax.engine import plan
from icejax.runtime.compile_clock import ENDED, LOWERED, clock
from tests.helpers.commands import run


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--promt", "x"], "unrecognized arguments: --promt (did you mean --prompt?)"),
        (["--cache", "clusterd"], "(did you mean clustered?)"),
        (["--cache-option", "bugdet=3"], "reuse (did you mean budget?)"),
    ],
)
def test_a_name_that_is_nearly_right_is_named(capsys, arguments, message):
    status, out, err = run(capsys, "--prompt", "x", *arguments)
    assert (status, out) == (2, "") and err.endswith(f"{message}\n") and err.count("\n") == 1


def test_every_option_of_every_cache_has_a_line(capsys):
    status, out, err = run(capsys, "--help-cache")
    assert (status, err) == (0, "") and "\nfull:\n  no options\n" in f"\n{out}"
    assert "icecache: clustered with rerank=false, tail=false, balance=false, score=mean, group=interleave\n" in out
    for name, kind in icejax.POLICIES.items():
        fields = [field for field in dataclasses.fields(kind) if field.name != "movable"]
        lines = [*itertools.takewhile(bool, f"\n{out}".partition(f"\n{name}:\n")[2].splitlines())]
        for field, line in zip(fields, lines, strict=bool(fields)):
            assert line.startswith(f"  {field.name}: ") and len(line) > len(field.name) + 30
            assert line.endswith(f"(default: {str(field.default).lower()})")


@pytest.mark.slow
def test_a_verbose_run_says_how_it_runs(capsys, monkeypatch, bundled):
    monkeypatch.setattr("icejax.commands.generate.load", lambda *_: bundled)
    status, out, err = run(capsys, "--prompt", "import os", "--max-new-tokens", "2", "--budget", "256", "--verbose")
    lines = [line.removeprefix("icejax.generate: info: ") for line in err.splitlines()]
    assert status == 0 and lines[:2] == [
        "1 rows of at most 9 tokens, padded to 256, and room for 256 new ones",
        "layers: 0-3 clustered",
    ]
    assert re.fullmatch(r"first token after \d+\.\d\d s, \d+\.\d\d s of them compiling", lines[-1])
    assert run(capsys, "--prompt", "import os", "--max-new-tokens", "2", "--budget", "256")[2] == ""
    assert run(capsys, "--prompt", "import os", "--max-new-tokens", "2", "--quiet")[2] == ""


def test_first_layers_and_windows_are_told_apart():
    policies = (Full(), Full(), Clustered(), Ring(64), Clustered(), Clustered())
    assert plan._by_layer(policies) == "0-1 full, 2 clustered, 3 ring, 4-5 clustered"


@pytest.mark.slow
@pytest.mark.parametrize("width, several", [(60, 1), (60, 7), (100, 7)])
def test_the_table_fits_the_terminal(bundled, width, several):
    responses = icejax.generate(*bundled, "import os", cache=Clustered(), max_new_tokens=2) * several
    console = Console(width=width, file=io.StringIO())
    console.print(
        table([replace(response, prompt_tokens=10**6, ttft_s=1234.5, compile_s=98.76) for response in responses], console)
    )
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width and sum(line.count("1000000") for line in lines) == several
    shown = " ".join(" ".join(lines).split())
    for name in ("prompt", "ended", "compiling", "full"):
        assert name in shown
    assert "clustered cache, budget 256, float32" in shown and shown.count("98.76 s") == several


@pytest.mark.parametrize("width", [60, 100, 150])
def test_the_table_has_what_one_answer_of_a_run_knows(bundled, width):
    """A one-token answer has no decode step, so no expert statistics; other answers of the run still show theirs."""
    short = icejax.generate(*bundled, "import os", cache=Clustered(), max_new_tokens=1)[0]
    long = replace(short, expert_hit_rate=0.625, expert_bytes_per_token=2.0**21, estimated_error=0.0125, budget_used=8765.0)
    console = Console(width=width, file=io.StringIO())
    console.print(table([short, replace(long, estimated_error=None), long], console))
    shown = console.file.getvalue()
    assert shown.count("62%") == 2 and shown.count("2.0 MiB") == 2 and shown.count("1.2%") == 1 and shown.count("8765") == 1


def test_bars_name_the_wait_for_a_program():
    column = Speed()
    task = SimpleNamespace(speed=12.34)
    assert str(column.render(task)) == "12.3/s"
    clock()._add(LOWERED, 0.0)
    assert str(column.render(task)) == "compiling"
    clock()._add(ENDED, 0.0)
    assert str(column.render(SimpleNamespace(speed=None))) == ""


def test_explain_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = run(capsys, "--prompt", "x", "--explain", "seen.png")
    assert (status, out, err.count("\n")) == (2, "", 1) and "which is not installed: pip install matplotlib" in err
