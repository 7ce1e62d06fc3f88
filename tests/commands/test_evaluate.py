"""`icejax evaluate`: a task on the bundled model, its table and files, and what it refuses."""

import gzip
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
    assert run(*command, "--cache", "full", "--context-length", 300) == 2
    assert "another model, cache or context length" in capsys.readouterr().err


@pytest.mark.slow
def test_tasks_over_local_files_and_their_group(tmp_path, capsys):
    (tmp_path / "longchat").mkdir()
    for count in (200, 300, 400, 500, 680):
        # The bundled model finds pass keys; of the two answers one is said to be right.
        lines = [dict(prompt=LINES[0]["text"], expected_number=number) for number in (94864, 1)]
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        (tmp_path / f"longchat/{count}_lines.jsonl.gz").write_bytes(gzip.compress(text))
    command = ["--tasks", "longchat_lines", "--data", tmp_path, "--output", tmp_path / "scores", "--cache", "full"]
    assert run(*command, "--gen-kwargs", "max_gen_toks=6", "--context-length", 512, "--compile-cache", "none") == 0
    table = capsys.readouterr().out
    assert table.count("0.5000 ±") == 6 and "longchat_lines_680" in table
    results = json.loads((tmp_path / "scores/full/results.json").read_text())["results"]
    assert results["longchat_lines"]["score,none"] == results["longchat_lines_300"]["score,none"] == 0.5
    assert len((tmp_path / "scores/full/answers.jsonl").read_text().splitlines()) == 2  # equal prompts run once


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tasks", "letters", "--system", "x"], "--system needs --chat"),
        (["--tasks", "letters", "--limit", "0"], "--limit must be at least 1, got 0"),
        (["--tasks", "letters", "--cache", "full", "--against", "full"], "is the cache that is scored"),
        (["--tasks", "letters", "--against", "no"], "no"),
        (["--tasks", "letters", "--include-path", "/nowhere"], "--include-path"),
        ([], "--tasks"),
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


def test_without_the_harness_a_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run("--tasks", "gsm8k") == 2
    assert "pip install 'icejax[evaluate]'" in capsys.readouterr().err
