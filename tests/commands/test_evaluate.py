"""`icejax evaluate`: a task on the bundled model, its table and files, and what it refuses."""

import importlib.util
import json
import stat

import pytest

from icejax.commands import evaluate

pytest.importorskip("lm_eval")
TASK = """
task: letters
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8}}
metric_list: [{{metric: exact_match}}]
"""
LINES = [
    dict(text="Pass key tb:94864.\nPass key tb:", answer="94864."),
    dict(text="Pass key tb:94864.\nPass key tb:", answer="1"),
]


def run(*arguments) -> int:
    return evaluate.main([str(argument) for argument in arguments], name="icejax evaluate")


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (folder / "letters.yaml").write_text(TASK.format(file=folder / "test.jsonl"))
    return folder


@pytest.mark.slow
def test_two_caches_are_scored_in_pairs_and_a_run_goes_on(tmp_path, tasks, capsys, monkeypatch):
    output = tmp_path / "scores"
    command = [
        "--tasks",
        "letters",
        "--include-path",
        tasks,
        "--output",
        output,
        "--context-length",
        512,
        "--compile-cache",
        "none",
    ]
    assert run(*command, "--cache", "clustered", "--budget", 96, "--against", "full") == 0
    table = capsys.readouterr().out
    assert "clustered" in table and "0.5000" in table and "+0.0000 to +0.0000" in table
    results = json.loads((output / "clustered-96" / "results.json").read_text())
    assert results["results"]["letters"]["exact_match,none"] == 0.5
    samples = [json.loads(line) for line in (output / "full" / "samples_letters.jsonl").read_text().splitlines()]
    assert [(sample["filtered_resps"], sample["exact_match"]) for sample in samples] == [(["94864."], 1), (["94864."], 0)]
    assert stat.S_IMODE((output / "full" / "results.json").stat().st_mode) == 0o600
    from icejax.evaluation import harness

    monkeypatch.setattr(harness, "stream_generate", None)  # a call would fail
    assert run(*command, "--cache", "full") == 0
    assert "0.5000" in capsys.readouterr().out
    assert run("--compare", output, "--output", tmp_path / "report") == 0
    assert "+0.0000 to +0.0000" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "report" / "report.jsonl").read_text().splitlines()]
    assert [(row["cache"], row["budget"], row["samples"]) for row in rows] == [("clustered", 96, 2), ("full", None, 2)]
    assert all(row["device_bytes"] > 0 and row["seconds_per_token"] > 0 and row["prompt_tokens"] > 20 for row in rows)
    assert rows[0]["host_bytes"] > 0 == rows[1]["host_bytes"] and rows[0]["versions"].keys() >= {"icejax", "jax", "lm_eval"}
    assert "clustered 96" in (tmp_path / "report" / "report.html").read_text()
    assert run(*command, "--cache", "full", "--context-length", 300) == 2
    assert "another model, cache or context length" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tasks", "letters", "--system", "x"], "--system needs --chat"),
        (["--tasks", "letters", "--limit", "0"], "--limit must be at least 1, got 0"),
        (["--tasks", "letters", "--cache", "full", "--against", "full"], "is the cache that is scored"),
        (["--tasks", "letters", "--against", "no"], "no"),
        (["--tasks", "letters", "--include-path", "/nowhere"], "--include-path"),
        (["--tasks", "letters", "--compare", "."], "--compare reads runs that are there, and runs none: leave --tasks out"),
        (["--compare", "/nowhere"], "/nowhere has no results.json"),
        ([], "--tasks NAMES is needed"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") <= 2 and "Traceback" not in error


@pytest.mark.slow
def test_a_task_that_nobody_has_and_missing_data(tmp_path, capsys):
    assert run("--tasks", "no_such_task", "--output", tmp_path / "a") == 2
    assert "no task is named no_such_task" in capsys.readouterr().err
    assert run("--tasks", "gsm8k", "--data", tmp_path, "--output", tmp_path / "a") == 2
    assert "--data has no gsm8k/train-head.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["lm_eval", "matplotlib"])
def test_without_a_package_a_line_says_what_to_install(monkeypatch, capsys, missing):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else name)
    assert run("--tasks", "gsm8k") == 2
    error = capsys.readouterr().err
    assert "pip install 'icejax[evaluate]'" in error and missing.replace("_", "-") in error
