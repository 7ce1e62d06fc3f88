"""`bench.serving`: its figures are right for given times, loads keep their number and rate, and every part has its rows."""

import asyncio
import json

import pytest

from bench.serving import __main__ as command
from bench.serving.client import Timed
from bench.serving.rows import load_row, slope
from bench.serving.subject import Question, closed_loop, open_loop

TINY = (
    "--parts load,document,cancel,soak --concurrency 2 --rates 50 --requests 4 --prompt-tokens 30 --answer-tokens 4 "
    "--document-tokens 600 --questions 3 --cancels 20 --minutes 0.02 -- --cache clustered --warmup 0"
)


class Clerk:
    """Answers with a token after `seconds`, and remembers how many questions were open."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.open, self.most, self.came = seconds, 0, 0, []

    async def answer(self, question: Question) -> Timed:
        self.came.append(asyncio.get_running_loop().time())
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(self.seconds)
        self.open -= 1
        return Timed(0.0, [1.0], 1.0, tokens=1)


def test_figures_follow_from_times():
    answers = [
        Timed(10.0, [10.5, 10.6, 10.9], 11.0, tokens=3, prompt_tokens=20),
        Timed(10.0, [11.5, 11.7], 12.0, tokens=5, prompt_tokens=30),
        Timed(10.0, error="status 500"),
    ]
    row = load_row(answers, 4.0)
    assert (row["completed"], row["failed"], row["total_input_tokens"], row["total_output_tokens"]) == (2, 1, 50, 8)
    assert (row["request_throughput"], row["output_throughput"]) == (0.5, 2.0)
    assert (row["mean_ttft_ms"], row["median_e2el_ms"]) == (1000.0, 1500.0)
    assert row["mean_tpot_ms"] == pytest.approx((200 + 50) / 2)
    assert row["mean_itl_ms"] == pytest.approx(200) and row["p99_itl_ms"] == pytest.approx(298)
    assert slope([0, 1, 2, 3, 4, 5], [9, 1, 7, 1, 2, 3]) == pytest.approx(60)


def test_a_closed_loop_keeps_its_number_open():
    clerk = Clerk(0.01)
    answers, _ = asyncio.run(closed_loop(clerk, [Question("", 1)] * 10, 3))
    assert (len(answers), clerk.most, clerk.open) == (10, 3, 0)


def test_an_open_loop_waits_for_no_answer():
    clerk = Clerk(0.5)
    answers, duration = asyncio.run(open_loop(clerk, [Question("", 1)] * 40, 200.0))
    assert len(answers) == clerk.most == 40 and duration >= 0.5
    assert 0.05 < clerk.came[-1] - clerk.came[0] < 0.4


def test_every_part_has_its_rows(capsys, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # the servers run longer than they compile
    assert command.main(TINY.split()) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    parts = [(row["subject"], row["part"]) for row in rows]
    assert parts == [
        *[("http", "load")] * 2,
        *[("http", "document")] * 3,
        *[("engine", "load")] * 2,
        *[("http / engine", "ratio")] * 2,
        ("http", "cancel"),
        ("http", "soak"),
    ]
    assert all(row["model"] == "bundled" and row["version"].startswith("icejax ") for row in rows)
    for row in rows[:2] + rows[5:7]:
        assert (row["completed"], row["failed"], row["total_output_tokens"]) == (4, 0, 16) and row["p99_itl_ms"] > 0
    assert [row["cached_tokens"] for row in rows[2:5]] == [0, 0, 512]
    assert rows[-2]["extents_leaked"] == 0 and rows[-2]["cancels"] > 0
    assert rows[-1]["failed"] == 0 and rows[-1]["rss_end_mib"] > 100


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--parts none", "--parts must be of load, document, cancel, soak, got 'none'"),
        ("--rates fast", "--rates must be numbers, comma-separated, got 'fast'"),
        ("--rates 0", "--rates must be a number above 0 and at most 1e+06, got 0.0"),
        ("--against https://a", "--against must be NAME=http://HOST:PORT, got 'https://a'"),
        ("--requests 0", "--requests must be at least 1, got 0"),
        ("--minutes 0", "--minutes must be a number above 0 and at most 1e+06, got 0.0"),
    ],
)
def test_a_bad_option_is_told(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments.split())
    assert ended.value.code == 2 and message in capsys.readouterr().err
