"""`bench.engine` times requests that come and go: its ratios and bars are right for given times, and rows have their figures."""

import contextlib
import json
from types import SimpleNamespace

import numpy as np
import pytest

from bench.engine import __main__ as command
from bench.engine import batch, lines, prefill, prefix
from bench.engine.bars import judged
from bench.engine.subject import Sizes
from icejax.engine.request import Request

TINY = (
    "--cache full --batch 2 --prompt-tokens 20 --steps 4 --rows 2 --long-prompt 60 --row-tokens 100 --lines 3 --least-prompt 5 "
    "--most-prompt 30 --least-answer 2 --most-answer 5 --question 5 --repeats 2"
)
FIGURES = {
    ("batch", "throughput"): {"batch_tokens_per_s", "one_tokens_per_s"},
    ("prefill", "itl"): {"p99_s", "max_s", "gaps", "step_s", "longest_unit_s", "units"},
    ("prefill", "ttft"): {"ttft_s", "alone_s"},
    ("lines", "throughput"): {"stream_tokens_per_s", "batches_tokens_per_s", "answer_tokens"},
}
ALWAYS = {
    "ratio",
    "ratio_low",
    "ratio_high",
    "bar",
    "holds",
    "compile_s",
    "model",
    "cache",
    "repeats",
    "device",
    "dtype",
    "version",
}


def test_every_row_has_its_figures(capsys):
    assert command.main([*TINY.split(), "--parts", "batch,prefill,lines"]) == 0
    out, err = capsys.readouterr()
    rows = {(row["part"], row["measure"]): row for row in map(json.loads, out.splitlines())}
    assert list(rows) == list(FIGURES) and "ratio low" in err
    for name, row in rows.items():
        assert FIGURES[name] | ALWAYS <= set(row)
        assert all(row[figure] > 0 for figure in FIGURES[name]) and row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert (row["model"], row["cache"], row["repeats"]) == ("bundled", "full", 2)
        assert row["compile_s"] < 0.1  # some small traces; a compiled program takes longer
    assert rows["prefill", "itl"]["units"] >= 2 and rows["prefill", "itl"]["longest_unit_s"] < rows["prefill", "itl"]["max_s"]


@pytest.mark.parametrize(
    "part, measure, ratios, bar, holds",
    [
        ("batch", "throughput", [2.0, 3.0, 4.0], ">= 3", True),
        ("batch", "throughput", [2.9, 2.9, 4.0], ">= 3", False),
        ("prefill", "itl", [1.5], "<= 1.5", True),
        ("prefill", "ttft", [1.5, 1.61, 1.7], "<= 1.6", False),
        ("lines", "throughput", [1.49], ">= 1.5", False),
        ("prefix", "ttft", [0.05], "<= 0.05", True),
        ("prefix", "ttft", [0.051], "<= 0.05", False),
        ("prefix", "disk_ttft", [0.2], "<= 0.2", True),
        ("prefix", "disk_ttft", [0.21], "<= 0.2", False),
    ],
)
def test_the_median_ratio_is_held_against_the_bar(part, measure, ratios, bar, holds):
    row = judged(part, measure, ratios, batch=8)
    assert row["ratio"] == np.median(ratios) and (row["ratio_low"], row["ratio_high"]) == (min(ratios), max(ratios))
    assert (row["bar"], row["holds"], row["batch"]) == (bar, holds, 8)


def test_a_rate_counts_the_steps_in_which_all_rows_decode():
    assert batch.decode_rate([[0, 1, 2, 3, 4], [2, 3, 4, 5]]) == 2.0
    assert batch.decode_rate([[0, 0.5, 1.0]]) == 2.0


@pytest.mark.parametrize("second", [[3, 4, 5], [2, 3, 5], [1.5, 4, 5]], ids=["apart", "one moment", "no step"])
def test_rows_without_a_common_step_count_all_steps_in_all_the_time(second):
    assert batch.decode_rate([[0, 1, 2], second]) == 4 / 5


def test_gaps_are_those_that_a_span_of_time_touches():
    assert prefill.gaps_between([[0, 1, 4, 5]], 2, 3) == [3]
    assert prefill.gaps_between([[0, 1, 4, 6], [0.5, 2.5, 9]], 0.75, 4.5) == [1, 3, 2, 2, 6.5]


def test_ratios_of_a_prefill_are_of_its_times():
    gaps = [0.1] * 98 + [0.3, 0.5]
    rounds = [
        prefill.Round(steps=[0.04, 0.05], gaps=gaps[:50], units=[0.2, 0.1], ttft_s=3.0, alone_s=2.0),
        prefill.Round(steps=[0.05, 0.06], gaps=gaps[50:], units=[0.4], ttft_s=4.0, alone_s=2.0),
    ]
    itl, ttft = prefill.judged_rounds(rounds, rows=4)
    assert (itl["step_s"], itl["max_s"], itl["longest_unit_s"], itl["units"], itl["gaps"]) == (0.05, 0.5, 0.4, 3, 100)
    # The 99th of 100 gaps, in order, is 0.3 s; the next is 0.5 s, of which the percentile's hundredth counts.
    assert itl["p99_s"] == pytest.approx(0.302) and itl["ratio"] == pytest.approx(0.302 / 0.2) and not itl["holds"]
    assert (ttft["ttft_s"], ttft["alone_s"], ttft["ratio"], ttft["ratio_high"], ttft["rows"]) == (3.5, 2.0, 1.75, 2.0, 4)


def test_lengths_are_unlike_within_their_limits():
    lengths = lines.lognormal(np.random.default_rng(0), 4000, 20, 2000)
    assert min(lengths) == 20 and max(lengths) == 2000 and 185 < np.median(lengths) < 215
    assert 0.64 < np.mean([63 <= n <= 632 for n in lengths]) < 0.72
    assert lines.lognormal(np.random.default_rng(0), 3, 7, 7) == [7, 7, 7]


def test_batches_are_of_like_length():
    requests = [Request(prompt=[0] * n) for n in (5, 9, 4, 8, 7)]
    assert [[len(request.prompt) for request in group] for group in lines.batches(requests, 2)] == [[4, 5], [7, 8], [9]]


def test_a_document_is_stored_before_its_questions_are_timed(monkeypatch):
    """Every question to the disk is the first one of its engine."""
    asked, numbers, engines = [], iter(range(1000)), iter(range(10))

    class Asked:
        def __init__(self, store, prompt, new_tokens):
            asked.append((store, prompt))
            self.ttft_s = (4.0, 0.1)[store] if store < 2 else 0.5
            self.newest = SimpleNamespace(cached_tokens=2)

        def wait(self, tokens):
            return self

    def engine(*, context, answer, batch_size, prefix_memory, prefix_dir=None):
        assert (prefix_memory, prefix_dir is None) in ((0, True), (9, False))
        return contextlib.nullcontext(next(engines))

    monkeypatch.setattr(prefix, "Asked", Asked)
    subject = SimpleNamespace(prompt=lambda tokens: [next(numbers) for _ in range(tokens)], engine=engine)
    memory, disk = prefix.measure(subject, Sizes(document=2, question=1, repeats=2, prefix_memory=9))
    assert asked[:3] == [(0, [0, 1, question]) for question in (2, 3, 4)]
    assert asked[3:9] == [(1, [0, 1, question]) for question in (5, 6, 6, 7, 8, 9)]
    assert asked[9:] == [(2 + i, [0, 1, 10 + i]) for i in range(3)]
    assert (memory["stored_ttft_s"], memory["without_ttft_s"], memory["ratio"], memory["holds"]) == (0.1, 4.0, 0.025, True)
    assert (disk["stored_ttft_s"], disk["ratio"], disk["holds"]) == (0.5, 0.125, True)
    assert (disk["cached_tokens"], disk["document"], disk["question"]) == (2, 2, 1)


def test_a_stored_document_is_not_computed_anew(capsys):
    assert command.main([*TINY.split(), "--parts", "prefix", "--document", "300"]) == 0
    for row in map(json.loads, capsys.readouterr().out.splitlines()):
        assert row["cached_tokens"] == 256 and row["compile_s"] < 0.1 and row["stored_ttft_s"] > 0  # a block has 256 tokens


def test_rows_that_end_too_early_are_a_line(capsys):
    with pytest.raises(SystemExit) as end:
        command.main([*TINY.split(), "--parts", "prefill", "--row-tokens", "3"])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and not out
    assert "a row ended after 3 tokens, before its round did: raise --row-tokens" in err.splitlines()[-1]
