"""`bench.evaluation`: answers behind a shared prefill, runs that continue, the remaining runs, and the page."""

import gzip
import json
import shlex

import numpy as np
import pytest

import icejax
from bench.evaluation import __main__ as evaluation
from bench.evaluation import exact, page, rows, runs
from bench.needle.evaluate import wilson
from icejax.api.generate import ASSETS
from icejax.cache.registry import Clustered, Full, SnapKV
from icejax.checks.errors import InputError
from icejax.engine import prefill
from tests import tolerances

pytest.importorskip("lm_eval")
instance = pytest.importorskip("lm_eval.api.instance")
harness = pytest.importorskip("icejax.evaluation.harness")
together = pytest.importorskip("bench.evaluation.together")

CACHES = (Full(), Clustered(budget=64), SnapKV(budget=64))
NEEDLE = "# Pass key tb: 94864.\n"
FILLER = "".join(f"def add_{i}(a, b):\n    return a + b + {i}\n\n" for i in range(16))
PROMPTS = [NEEDLE + FILLER + "# Pass key tb:", FILLER[:300] + NEEDLE + FILLER + "# Pass key tb:"]


@pytest.fixture
def counted(monkeypatch):
    """The prompts whose exact attention is computed."""
    prompts, read = [], exact.ExactText.read

    def counting(model, prompt, spec, folder):
        prompts.append(bytes(prompt).decode())
        return read(model, prompt, spec, folder)

    monkeypatch.setattr(exact.ExactText, "read", counting)
    return prompts


def models(bundled):
    answering = together.stream(*bundled, 768)
    return [harness.HarnessModel(*bundled, cache=cache, batch_size=2, max_length=1024, stream=answering) for cache in CACHES]


def test_answers_behind_a_shared_prefill_are_those_of_generate(bundled, tmp_path, counted):
    asked = models(bundled)
    shared = together.Together(asked, tmp_path, lambda _: None)
    generation = dict(until=["\n"], max_gen_toks=12, do_sample=False)
    texts = [instance.Instance("generate_until", {}, (prompt, generation), i) for i, prompt in enumerate(PROMPTS)]
    shared.generate_until(texts, disable_tqdm=True)
    tokens = [list(prompt.encode()) for prompt in PROMPTS]
    forced = [instance.Instance("token_logprobs", {}, (f"window {i}", x, 20), i) for i, x in enumerate(tokens)]
    shared.token_logprobs(forced, disable_tqdm=True)
    assert sorted(counted) == sorted([*PROMPTS, *(prompt[:-20] for prompt in PROMPTS)])
    for one in asked:
        answers = icejax.generate(*bundled, PROMPTS, cache=one.cache, max_new_tokens=12, stop="\n")
        assert one.generate_until(texts, disable_tqdm=True) == [answer.text for answer in answers]
        requests = [icejax.Request(prompt=x[:-20], forced_tokens=x[-20:], logprobs=0) for x in tokens]
        expected = [
            [x.chosen.logprob for x in answer.logprobs] for answer in icejax.generate(*bundled, requests, cache=one.cache)
        ]
        np.testing.assert_allclose(one.token_logprobs(forced, disable_tqdm=True), expected, rtol=0, atol=tolerances.EXACT)
    assert len(counted) == 4 and prefill.prefill_layers.__module__ == prefill.__name__


def test_sessions_behind_a_shared_prefill_are_those_of_each_cache(bundled, tmp_path, counted, monkeypatch):
    monkeypatch.setattr(exact, "IN_MEMORY", 0)  # heads are in files
    asked = models(bundled)
    options = dict(questions=["# Pass key tb", "# Pass key tb"], max_gen_toks=[8, 8], length=1024, shared=False, chat=False)
    options |= dict(system=None, begun=":", end="\n")
    [request] = [instance.Instance("converse", {}, (NEEDLE + FILLER, options), 0)]
    together.Together(asked, tmp_path, lambda _: None).converse([request], disable_tqdm=True)
    assert len(counted) == 1 and not list(tmp_path.iterdir())
    for one in asked:
        alone = harness.HarnessModel(*bundled, cache=one.cache, max_length=1024)
        assert one.converse([request], True) == alone.converse([request], True)
    assert len(counted) == 1


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the command on the bundled model, with lines of pass keys as the task."""
    (tmp_path / "data/longchat").mkdir(parents=True)
    lines = [dict(prompt=prompt, expected_number=number) for prompt in PROMPTS for number in (94864, 1)]
    text = "".join(json.dumps(line | dict(prompt=f"# {i}\n{line['prompt']}")) + "\n" for i, line in enumerate(lines))
    (tmp_path / "data/longchat/200_lines.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    monkeypatch.setattr(runs, "TASK_CACHES", ["full", "snapkv-64"])
    answering = together.stream
    monkeypatch.setattr(together, "stream", lambda model, tokenizer, _: answering(model, tokenizer, 1024))
    places = ["--model", str(ASSETS), "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    return lambda *arguments: evaluation.main([*places, "--runs", "longchat_lines_200", *arguments])


def test_an_interrupted_run_goes_on_and_its_rows_are_paired(command, tmp_path, counted, monkeypatch, capsys):
    converted, told = together.Together._ask, []

    def failing(self, *arguments):
        if len(told) == 1:
            raise KeyboardInterrupt
        told.append(arguments)
        converted(self, *arguments)

    monkeypatch.setattr(together.Together, "_ask", failing)
    with pytest.raises(KeyboardInterrupt):
        command("--limit", "4")  # two groups of two
    assert len(counted) == 2
    monkeypatch.setattr(together.Together, "_ask", converted)
    assert command("--limit", "3") == 0
    assert len(counted) == 3
    folder = tmp_path / "out/q5/longchat_lines_200"
    took = json.loads((folder / "full/results.json").read_text())["icejax"]["tasks"]["longchat_lines_200"]
    assert took["answers"] == 3 and took["device_bytes"] > 0 and took["seconds_per_token"] is None
    assert command("--limit", "2") == 0 and command("--limit", "3", "--dry-run") == 0  # finished: nothing runs
    assert "# 0 runs are left" in capsys.readouterr().out and len(counted) == 3
    assert command("--limit", "4") == 0 and len(counted) == 4
    full, snapkv = rows.of_runs(runs.all_runs(), tmp_path / "out")
    assert full["samples"] == snapkv["samples"] == snapkv["pairs"] == 4 and full["score"] == 0.5 and "pairs" not in full
    assert snapkv["difference"] == snapkv["score"] - full["score"] and snapkv["against"] == "full"
    assert evaluation.main(["--page", "--out", str(tmp_path / "out"), "--results", str(tmp_path)]) == 0
    assert "| `full` | 0.500 (0.150 to 0.850) | 4 | - | - |" in (tmp_path / page.PAGE).read_text()


def test_a_dry_run_prints_commands_of_icejax_evaluate(tmp_path, capsys):
    from icejax.commands import evaluate

    arguments = ["--question", "1", "--out", str(tmp_path / "out"), "--data", str(tmp_path), "--limit", "3", "--dry-run"]
    assert evaluation.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [shlex.split(line)[2:] for line in lines if line.startswith("icejax evaluate ")]
    assert len(commands) == 22 and lines[-1].startswith("# 22 runs are left, about ")
    for parsed in (evaluate.parser("").parse_args(command) for command in commands):
        evaluate.check(parsed)
        weights, cache, batch = parsed.output.name.split("-")
        assert (parsed.cache, str(parsed.batch_size), parsed.limit) == (cache, batch, 3)
        assert parsed.quantize == (weights if weights.startswith("int") else None)
        assert parsed.model.endswith(".gguf") == (weights == "gguf")
    assert not (tmp_path / "out").exists()


def test_a_finished_run_of_another_model_is_told(tmp_path, capsys):
    for run in (run for run in runs.all_runs() if run.name in ("fp32-full-1", "gguf-full-1")):
        path, name = run.folder(tmp_path) / "results.json", run.model("smollm2-135m").name
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(dict(config=dict(limit=8), icejax=dict(model=name))))
        arguments = ["--runs", run.name, "--out", str(tmp_path), "--dry-run"]
        assert evaluation.main([*arguments, "--model", "smollm2-135m"]) == 0
        assert capsys.readouterr().out.startswith("# 0 runs are left")
        with pytest.raises(SystemExit) as end:
            evaluation.main(arguments)
        told = f"{path} is of {name}, not of {run.model(runs.MODEL).name}: give another --out\n"
        assert end.value.code == 2 and capsys.readouterr().err == f"python -m bench.evaluation: error: {told}"


def line(question, run, cache, task, metric="score", **values):
    fields = dict(
        question=question, run=run, model="m", cache=cache, task=task, metric=metric, budget=None, weights="fp32", batch=1
    )
    fields |= dict(samples=8, score=0.5, low=0.25, high=0.75, tokens_per_s=None, device_bytes=3 * 2**20, host_bytes=2**19)
    return fields | values


DIFFERENCE = dict(against="full", pairs=8, difference=-0.25, difference_low=-0.5, difference_high=0.125)


def test_the_page_has_a_table_for_each_task(tmp_path):
    found = [
        line(1, "int8-full-4", "full", "humaneval", "pass@1", weights="int8", batch=4, tokens_per_s=9.96),
        line(1, "fp32-full-1", "full", "humaneval", "pass@1"),
        *(line(3, f"m-{length}", "snapkv", "m", "turn_1", budget=256, **DIFFERENCE) for length in (8192, 4096)),
        *(line(5, "ruler-4096", "q8_0", task, **DIFFERENCE) for task in ("ruler_vt_4096", "ruler-4096")),
        *(line(5, "lines", "clustered", "lines", budget=budget) for budget in (64, 256)),
    ]
    page.write(found, tmp_path)
    text = (tmp_path / page.PAGE).read_text()
    assert "| `full` | int8 | 4 | 0.500 (0.250 to 0.750) | 8 | - | - | 10.0 | 3.0 | 0.5 |" in text
    sessions = [row for row in text.splitlines() if "`snapkv` 256" in row]
    assert [row.split(" | ")[0] for row in sessions] == ["| 4,096", "| 8,192"]
    assert "| -0.250 (-0.500 to +0.125) | 8 | 3.0 | 0.5 |" in sessions[0]
    assert (
        "### ruler, score\n\n| tokens | cache | score |" in text and text.count("`q8_0`") == 1 and "ruler_vt" not in text
    )  # a part is no table
    assert [row.split(" | ")[0] for row in text.splitlines() if "`clustered`" in row] == [
        "| `clustered` 64",
        "| `clustered` 256",
    ]
    assert (tmp_path / page.PICTURE).read_bytes().startswith(b"\x89PNG")
    (tmp_path / page.PAGE).unlink()
    assert evaluation.main(["--page", "--out", str(tmp_path / "none"), "--results", str(tmp_path)]) == 0
    assert (tmp_path / page.PAGE).read_text() == text
    page.write([newer := line(1, "fp32-full-1", "full", "humaneval", "pass@1", samples=164)], tmp_path)
    kept = [json.loads(text) for text in (tmp_path / page.LINES).read_text().splitlines()]
    assert kept == [found[0], newer, *found[2:]]
    for less, told in (
        (found[1], f"fp32-full-1 with full has 8 samples in --out and 164 in {tmp_path / page.LINES}: run it with as many"),
        (
            {name: value for name, value in found[2].items() if name != "difference"},
            f"m-8192 with snapkv has a difference from full in {tmp_path / page.LINES} and none in --out: run full there too",
        ),
        (found[2] | dict(model="other"), f"{tmp_path / page.LINES} and --out have runs of m and other: give another --results"),
    ):
        with pytest.raises(InputError) as error:
            page.write([less], tmp_path)
        assert str(error.value) == told


def test_an_interval_is_that_of_its_kind_of_score():
    assert rows.interval([1.0, 0.0, 1.0, 0.0]) == (0.5, *wilson(2, 4))
    mean, low, high = rows.interval([0.2, 0.4, 0.6])
    assert (mean, high - mean, mean - low) == pytest.approx((0.4, 1.96 * 0.2 / 3**0.5, 1.96 * 0.2 / 3**0.5))
    assert rows.interval([0.3]) == (0.3, None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--runs", "gsm"), "--runs must be of gsm8k, "),
        (("--caches", "full,x"), "--caches must be of full, clustered-64, "),
        (("--limit", "0"), "--limit must be at least 1, got 0"),
        (("--page", "--results", "FOLDER"), "--out has no finished run, and FOLDER no evaluation.jsonl: expected one of them"),
        (("--runs", "kv_retrieval", "--data", "/nowhere"), "--data must be a folder, got /nowhere"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message, tmp_path, capsys):
    message, arguments = message.replace("FOLDER", str(tmp_path)), [part.replace("FOLDER", str(tmp_path)) for part in arguments]
    with pytest.raises(SystemExit) as end:
        evaluation.main(["--question", "5", "--model", str(ASSETS), "--out", str(tmp_path / "out"), *arguments])
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.startswith(f"python -m bench.evaluation: error: {message}") and err.count("\n") == 1
