"""`generate` and `stream_generate` with fewer places than prompts: texts, memory, progress and times."""

import gc
import json
import time

import jax
import pytest

import icejax
from icejax.cache.registry import Full
from icejax.commands import generate as command
from icejax.commands.terminal.phases import Phases
from icejax.engine.response import GenerationResponse
from icejax.engine.serving.core import Core
from tests.helpers import families
from tests.helpers.commands import run
from tests.helpers.letters import Letters

CLUSTERED = icejax.Clustered(budget=2048, page_size=8, compact_every=32)  # a budget for all tokens
REQUESTS = [
    icejax.Request(prompt=families.tokens(length, seed=length), max_new_tokens=limit)
    for length, limit in zip((40, 9, 77, 5, 130), (12, 3, 20, 1, 9), strict=True)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return families.load(families.build(families.row("llama-gqa")), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def together(model):
    """The answers of rows that decode all at once."""
    return icejax.generate(model, Letters(), REQUESTS, cache=Full())


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 2, 10**12])
@pytest.mark.parametrize("cache", [Full(), CLUSTERED], ids=["full", "clustered"])
def test_a_batch_of_any_size_gives_the_same_texts_in_order(model, together, batch_size, cache):
    answers = icejax.generate(model, Letters(), REQUESTS, cache=cache, batch_size=batch_size)
    assert [(a.row, a.text, a.token_ids) for a in answers] == [(a.row, a.text, a.token_ids) for a in together]


def test_a_row_takes_the_place_of_one_that_has_ended(model, together):
    """With two places the third prompt's first token comes after the second row's end, and before the first row's end."""
    events = [
        (piece.row, piece.new_tokens, piece.finish_reason)
        for piece in icejax.stream_generate(model, Letters(), REQUESTS, cache=Full(), batch_size=2)
    ]
    second_ends, third_begins, first_ends = (
        events.index(event) for event in ((1, 3, "length"), (2, 1, None), (0, 12, "length"))
    )
    assert second_ends < third_begins < first_ends
    assert [row for row, count, _ in events if count == 1] == [0, 1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("cache", [Full(), CLUSTERED], ids=["full", "clustered"])
@pytest.mark.parametrize("pieces", [1, 17])
def test_a_stream_that_is_closed_early_frees_its_arrays(model, together, cache, pieces):
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    stream = icejax.stream_generate(model, Letters(), REQUESTS, cache=cache, batch_size=2)
    for _ in range(pieces):
        next(stream)
    during = sum(array.nbytes for array in jax.live_arrays() if id(array) not in before)
    stream.close()
    gc.collect()
    after = sum(array.nbytes for array in jax.live_arrays() if id(array) not in before)
    assert during > 100_000 and after < 1000


@pytest.mark.parametrize(("batch_size", "total"), [(1, 3), (2, 6), (None, 15)])
def test_progress_counts_up_to_the_announced_total(model, batch_size, total):
    calls, layers = [], model.config.num_hidden_layers
    options = dict(cache=Full(), batch_size=batch_size, progress=lambda *call: calls.append(call))
    icejax.generate(model, Letters(), REQUESTS, **options)
    assert total == (batch_size or len(REQUESTS)) * layers
    assert [call[1:] for call in calls if call[0] == "prefill"] == [(done, total) for done in range(total + 1)]


def test_times_of_a_row_that_has_waited(model, monkeypatch):
    """The first token is counted from the call, and the speed of prefill from the prompt's own prefill."""
    prefill, waits = Core._prefill, [0.0, 0.5, 0.0]

    def slow_prefill(core):
        """The second prompt is prefilled late."""
        yield from prefill(core)
        time.sleep(waits.pop(0) if waits else 0.0)

    icejax.generate(model, Letters(), REQUESTS[:3], cache=Full(), batch_size=1)  # compiles
    monkeypatch.setattr(Core, "_prefill", slow_prefill)
    started = time.perf_counter()
    first, second, third = icejax.generate(model, Letters(), REQUESTS[:3], cache=Full(), batch_size=1)
    took = time.perf_counter() - started
    assert first.ttft_s < second.ttft_s < third.ttft_s < took and third.ttft_s > 0.5
    own_prefill_s = third.prompt_tokens / third.prefill_tps
    assert own_prefill_s < third.ttft_s - 0.5
    assert first.prompt_tokens / first.prefill_tps <= first.ttft_s


def test_lines_are_printed_in_order_as_they_end(capsys, monkeypatch, tmp_path, bundled, together):
    """A line that ends before an earlier one waits for it; no line waits for a later one."""
    written = []

    def stream(*_, **__):
        events = [(0, 1), (1, 1), (1, 2), (2, 1), (0, 2), (2, 2), (3, 2)]
        for row, count in events:
            report = dict(run=together[0].run, row=row, text=f"{row}{count}", finish_reason="stop" if count == 2 else None)
            yield GenerationResponse(**{**vars(together[0]), **report})
            written.append([json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()])

    monkeypatch.setattr(command, "load", lambda *_: bundled)
    monkeypatch.setattr(command, "stream_generate", stream)
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "x", "id": name}) for name in "abcd"))
    assert command.main(["--prompt-file", str(file), "--json", "--compile-cache", "none"]) == 0
    written.append([json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()])
    assert written == [[], [], [], [], ["a", "b"], ["c"], ["d"], []]


@pytest.mark.parametrize("size", ["1", "2", str(10**12)])
def test_the_command_line_answers_in_batches_of_any_size(capsys, monkeypatch, tmp_path, bundled, size):
    monkeypatch.setattr(command, "load", lambda *_: bundled)
    file, prompts = tmp_path / "lines.jsonl", ["import os", "x = [", "def f(a):"]
    file.write_text("\n".join(json.dumps({"prompt": text, "id": i, "max_new_tokens": 3 + i}) for i, text in enumerate(prompts)))
    common = ("--json", "--cache", "full", "--compile-cache", "none")
    status, out, err = run(capsys, "--prompt-file", str(file), "--batch-size", size, *common)
    lines = [json.loads(line) for line in out.splitlines()]
    assert (status, err) == (0, "") and [line["id"] for line in lines] == [0, 1, 2]
    requests = [icejax.Request(prompt=text, max_new_tokens=3 + i) for i, text in enumerate(prompts)]
    expected = icejax.generate(*bundled, requests, cache=Full())
    assert [tuple(line["token_ids"]) for line in lines] == [answer.token_ids for answer in expected]


def test_tokens_count_up_to_what_lines_ask_for(capsys, monkeypatch, tmp_path, bundled):
    """A line may ask for more tokens than the command line does."""
    calls = []
    monkeypatch.setattr(command, "load", lambda *_: bundled)
    monkeypatch.setattr(Phases, "__call__", lambda _, *call: calls.append(call))
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "import", "max_new_tokens": count}) for count in (5, 9)))
    line = ("--prompt-file", str(file), "--json", "--cache", "full", "--max-new-tokens", "2", "--compile-cache", "none")
    lines = [json.loads(row) for row in run(capsys, *line)[1].splitlines()]
    count = sum(line["new_tokens"] for line in lines)
    assert count > 4 and [call[1:] for call in calls if call[0] == "tokens"] == [(done, 14) for done in range(1, count + 1)]
