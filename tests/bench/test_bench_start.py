"""`bench.start` times fresh processes, cold and then warm; seconds of nested programs count once."""

import json
import os

import pytest

from bench import one_start, start

TRACE, LOWER, COMPILE, READ = one_start.EVENTS


def test_nested_programs_count_once():
    times = one_start.ProgramTimes()
    for event, begin, end in [(TRACE, 1, 2), (COMPILE, 2, 3), (TRACE, 0, 4), (LOWER, 4, 6), (READ, 7, 9), (COMPILE, 6.5, 9.5)]:
        times.add(event, end - begin, end=float(end))
    times.add("/jax/some/other/event", 5.0, end=20.0)
    assert times.seconds == dict(tracing_s=3.0, lowering_s=2.0, compiling_s=2.0, retrieving_s=2.0)
    assert times.programs == 2


def test_each_cold_start_has_an_empty_compile_cache(monkeypatch, capsys):
    began = []

    def run(model, cache, programs, sizes):
        began.append((cache, len(os.listdir(programs))))
        open(os.path.join(programs, f"{len(began)}"), "w").close()
        seconds = dict.fromkeys(start.COLUMNS, float(len(began)))
        return seconds | dict(programs=len(began), device="cpu: cpu", dtype="float32", version="jax 0")

    monkeypatch.setattr(start, "run", run)
    assert start.main(["--repeats", "3", "--caches", "full,streaming"]) == 0
    out, err = capsys.readouterr()
    assert began == [("full", 0), ("full", 1), ("streaming", 0), ("streaming", 1)] * 3
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["cache"], row["compile_cache"]) for row in rows] == [
        (cache, state) for cache in ("full", "streaming") for state in ("cold", "warm")
    ]
    # Runs 1, 5 and 9 are the cold ones of the full cache, and so on.
    assert [(row["total_s"], row["total_low_s"], row["total_high_s"]) for row in rows] == [
        (5, 1, 9),
        (6, 2, 10),
        (7, 3, 11),
        (8, 4, 12),
    ]
    assert "streaming, warm" in err


@pytest.mark.slow
def test_a_start_is_the_sum_of_its_parts(capsys):
    assert start.main(["--repeats", "1", "--caches", "full", "--prompt-tokens", "16", "--new-tokens", "4"]) == 0
    cold, warm = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    for row in (cold, warm):
        parts = sum(row[name] for name in ("imports_s", "reading_s", "first_token_s", "second_token_s"))
        assert row["total_s"] == pytest.approx(parts, abs=0.01)
        assert row["programs"] == cold["programs"] > 3
    assert cold["retrieving_s"] < warm["retrieving_s"] and warm["compiling_s"] < cold["compiling_s"]
