"""`icejax bench`: rows in order, with the figures that were measured; bad input in a line."""

import json

import pytest

from icejax.commands import bench
from icejax.evaluation.speed import Speed


@pytest.fixture
def measured(monkeypatch, bundled):
    """Runs the command on speeds that are made up: of n tokens in n / 100 to n / 400 s; returns what `measure` was asked."""
    asked = []

    def measure(model, policy, tests, **options):
        asked.append((policy, [test.name for test in tests], options["repetitions"], options["host_memory_limit"]))
        for test in tests:
            yield Speed(test, (test.tokens / 100, test.tokens / 200, test.tokens / 400), 3 * 2**20, 2**20, 5 * 2**20)

    monkeypatch.setattr(bench, "load", lambda *_: bundled)
    monkeypatch.setattr(bench, "measure", measure)
    return asked


def test_json_has_a_row_for_each_test(measured, capsys):
    options = "--json -p 512,64 -n 128 -d 0,4096 -r 3 --cache clustered --budget 128 --host-memory-limit 2".split()
    assert bench.main(options) == 0
    names = ["pp512", "pp64", "tg128", "pp512 @ d4096", "pp64 @ d4096", "tg128 @ d4096"]
    [(policy, asked, repetitions, limit)] = measured
    assert (policy.budget, asked, repetitions, limit) == (128, names, 3, 2**31)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["test"] for row in rows] == names
    last = rows[-1]
    assert (last["tokens"], last["depth"], last["seconds"]) == (128, 4096, [1.28, 0.64, 0.32])
    assert (last["tokens_per_s"], last["low_tokens_per_s"], last["high_tokens_per_s"], last["repetitions"]) == (
        200,
        100,
        400,
        3,
    )
    assert (last["device_kv_bytes"], last["digest_bytes"], last["host_kv_bytes"]) == (3 * 2**20, 2**20, 5 * 2**20)
    assert (last["cache"], last["budget"], last["dtype"], last["device"]) == ("clustered", 128, "float32", "cpu: cpu")
    assert (last["model"], last["model_type"], last["params"], last["weight_bytes"]) == ("bundled", "llama", 2820608, 11282432)
    assert last["peak_rss_bytes"] > 2**26 and last["peak_device_bytes"] is None and last["icejax"] and last["jax"]


def test_a_table_is_llama_benchs(measured, capsys):
    assert bench.main(["-p", "0", "-n", "32", "-d", "100", "--cache", "full"]) == 0
    heads, ruler, row, empty, versions = capsys.readouterr().out.splitlines()
    assert heads.startswith("| model | size | params |") and ruler.count("---") == heads.count(" | ") + 1
    cells = row.strip("| ").split(" | ")
    assert cells[:6] == ["bundled", "10.8 MiB", "2.82 M", "cpu: cpu", "full", "tg32 @ d100"]
    assert cells[6:8] == ["200.00 (100.00 - 400.00)", "4.0 MiB + 5.0 MiB"] and float(cells[8].removesuffix(" MiB")) > 64
    assert not empty and versions.startswith("icejax 0.1.0, jax ")


@pytest.mark.parametrize(
    "line, message",
    [
        (["-p", "x"], "--prompt-tokens must be whole numbers, comma-separated, got 'x'"),
        (["-n", "128,"], "--new-tokens must be whole numbers, comma-separated, got '128,'"),
        (["-d", "-1"], "--depth must be at least 0, got -1"),
        (["-d", "16777217"], "--depth must be at most 16777216, got 16777217"),
        (["-p", "0", "-n", "0"], "--prompt-tokens and --new-tokens are both 0, so nothing is timed: give one of them"),
        (["-r", "0"], "--repetitions must be at least 1, got 0"),
        (["--cache", "ful"], "(did you mean full?)"),
        (["--depht", "1"], "unrecognized arguments: --depht 1 (did you mean --depth?)"),
        (["--model", "/no/such"], "/no/such"),
    ],
)
def test_what_was_typed_wrong_is_told_in_one_line(capsys, line, message):
    assert bench.main(line) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("icejax bench: error: ") and message in err
