"""`icejax evaluate`: a task on the bundled model, its table and files, and what it refuses."""

import copy
import gzip
import importlib.util
import json
import math
import stat

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from icejax.api.generate import ASSETS
from icejax.cache.registry import ON_DEVICE, display_name
from icejax.checks.errors import InputError
from icejax.commands import evaluate
from tests import tolerances
from tests.helpers.in_processes import generate, model_folder, start

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
def test_two_caches_are_scored_in_pairs_and_a_run_goes_on(tmp_path, tasks, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)  # outside of a git repository, where lm-eval asks git for a commit
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
    table, errors = capfd.readouterr()
    assert "git" not in errors
    assert "clustered" in table and "0.5000" in table and "+0.0000 to +0.0000" in table
    results = json.loads((output / "clustered-96" / "results.json").read_text())
    assert results["results"]["letters"]["exact_match,none"] == 0.5
    samples = [json.loads(line) for line in (output / "full" / "samples_letters.jsonl").read_text().splitlines()]
    assert [(sample["filtered_resps"], sample["exact_match"]) for sample in samples] == [(["94864."], 1), (["94864."], 0)]
    assert stat.S_IMODE((output / "full" / "results.json").stat().st_mode) == 0o600
    from icejax.evaluation import harness

    monkeypatch.setattr(harness, "stream_generate", None)  # a call would fail
    assert run(*command, "--cache", "full") == 0
    assert "0.5000" in capfd.readouterr().out
    assert run("--compare", output, "--output", tmp_path / "report") == 0
    assert "+0.0000 to +0.0000" in capfd.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "report" / "report.jsonl").read_text().splitlines()]
    assert [(row["cache"], row["budget"], row["samples"]) for row in rows] == [("clustered", 96, 2), ("full", None, 2)]
    assert all(row["device_bytes"] > 0 and row["seconds_per_token"] > 0 and row["prompt_tokens"] > 20 for row in rows)
    assert rows[0]["host_bytes"] > 0 == rows[1]["host_bytes"] and rows[0]["versions"].keys() >= {"icejax", "jax", "lm_eval"}
    assert "clustered 96" in (tmp_path / "report" / "report.html").read_text()
    assert run(*command, "--cache", "full", "--context-length", 300) == 2
    assert "another model, cache, context length or version" in capfd.readouterr().err


@pytest.mark.parametrize(
    "options, caches",
    [
        (["--against", "full"], ["clustered 256", "full None"]),
        (["--against", "clustered"], ["full None", "clustered 256"]),
        (["--against", "full", "--budget", "64"], ["clustered 64", "full None"]),
        (["--against", "snapkv", "--cache", "full"], ["full None", "snapkv 256"]),
        (["--against", "snapkv"], ["full None", "snapkv 256"]),  # a short context fits the device
        ([], ["full None"]),
    ],
)
def test_a_cache_that_nobody_names_is_not_the_one_it_is_compared_with(tmp_path, bundled, monkeypatch, options, caches):
    scored = []
    monkeypatch.setattr(evaluate, "loaded", lambda *_: bundled)
    monkeypatch.setattr(evaluate, "harness_model", lambda arguments, model, tokenizer, policy, stream: policy)
    monkeypatch.setattr(evaluate, "score", lambda arguments, policy: scored.append(policy))
    monkeypatch.setattr(evaluate, "_report", lambda *_: None)
    # The names and flags of lm-evaluation-harness are options too.
    harness = ["--num_fewshot", 2, "--gen_kwargs", "max_gen_toks=4", "--log_samples", "--limit", 1, "--apply_chat_template"]
    assert run("--tasks", "letters", "--output", tmp_path, "--context-length", 512, *harness, *options) == 0
    assert [f"{display_name(policy)} {policy.budget}" for policy in scored] == caches


def test_a_run_is_compared_with_the_cache_that_against_names(tmp_path, bundled, monkeypatch):
    told = []
    monkeypatch.setattr(evaluate, "loaded", lambda *_: bundled)
    monkeypatch.setattr(evaluate, "harness_model", lambda arguments, model, tokenizer, policy, stream: policy)
    monkeypatch.setattr(evaluate, "score", evaluate.cache_folder)
    monkeypatch.setattr(evaluate, "_report", lambda arguments, folders, against: told.append((folders, against)))
    command = ["--tasks", "letters", "--output", tmp_path, "--cache", "clustered", "--budget", 64, "--against", "clustered"]
    assert run(*command) == 0 and run("--compare", tmp_path) == 0 and run("--compare", tmp_path, "--against", "h2o") == 0
    scored = [tmp_path / "clustered-64", tmp_path / "clustered-256"]
    assert told == [(scored, scored[1]), ([tmp_path], "full"), ([tmp_path], "h2o")]


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


@pytest.mark.slow
def test_a_files_perplexity_is_transformers_at_each_position(tmp_path, capsys):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    text = "".join(f"def add_{i}(a, b):\n    return a + b + {i}\n\n\n" for i in range(24))
    (tmp_path / "text.py").write_text(text)
    command = ["--tasks", "perplexity", "--text", tmp_path / "text.py", "--lengths", "64,300", "--context-length", 512]
    assert run(*command, "--cache", "full", "--output", tmp_path / "out", "--compile-cache", "none") == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "full" / "samples_perplexity.jsonl").read_text().splitlines()]
    model, tokens = (
        transformers.AutoModelForCausalLM.from_pretrained(ASSETS, dtype=torch.float32),
        torch.tensor([[*text.encode()]]),
    )
    assert [(row["doc"]["length"], row["doc"]["first"]) for row in rows] == [
        (64, 0),
        (300, 0),
        (64, 192),
        (300, 428),
        (64, 384),
        (64, 576),
    ]
    for row in rows:
        first, length = row["doc"]["first"], row["doc"]["length"]
        window = tokens[:, first : first + length + 128]
        with torch.no_grad():
            logits = model(window).logits[0, length - 1 : -1].log_softmax(-1)
        assert row["nll"] == pytest.approx(-float(logits[range(128), window[0, length:]].mean()), abs=tolerances.LOGITS)
    page = (tmp_path / "out" / "report.html").read_text()
    for length in (64, 300):
        shown = math.exp(np.mean([row["nll"] for row in rows if row["doc"]["length"] == length]))
        assert f"<td>{length}</td><td>{shown:.4g}</td>" in page


@pytest.mark.slow
def test_two_processes_score_as_one(tmp_path, capsys):
    (tmp_path / "text").write_text("".join(f"he {i} 12 x he he x\n\n" for i in range(60)))
    task = f"--tasks perplexity --text {tmp_path / 'text'} --lengths 64 --limit 2 --context-length 256 --cache full --output".split()
    command = generate(model_folder(tmp_path), 2, *task, str(tmp_path / "two"), "--quiet", command="evaluate")
    started = start(*command)
    try:
        ends = [process.communicate(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], ends
    assert "perplexity" in ends[0][0] and ends[1][0] == ""
    assert not any("%|" in errors for _, errors in ends)  # --quiet hides the bars of progress, lm-eval's too
    assert run("--model", tmp_path, *task, tmp_path / "one", "--compile-cache", "none") == 0
    files = [tmp_path / name / "full" / "samples_perplexity.jsonl" for name in ("one", "two")]
    one, two = ([json.loads(line)["nll"] for line in file.read_text().splitlines()] for file in files)
    assert len(two) == 2 and two == pytest.approx(one, abs=tolerances.LOGITS)


@pytest.mark.slow
def test_functions_are_asked_for_in_sessions(tmp_path, capsys, monkeypatch):
    tasks = "multi_turn_code,multi_request_code"
    command = [
        "--tasks",
        tasks,
        "--lengths",
        4096,
        "--context-length",
        4096,
        "--limit",
        1,
        "--output",
        tmp_path,
        "--budget",
        96,
    ]
    assert run(*command, "--compile-cache", "none") == 0
    for task in tasks.split(","):
        [row] = [json.loads(line) for line in (tmp_path / "clustered-96" / f"samples_{task}.jsonl").read_text().splitlines()]
        [[answers]] = row["resps"]
        assert len(answers) == len(row["target"]) == 3 and 0 <= row["similarity"] <= 1
        assert all(f"# Path: {row['arguments'][0][1]['questions'][i].split()[5]}" in row["arguments"][0][0] for i in range(3))
    from icejax.evaluation import conversation

    monkeypatch.setattr(conversation, "answers", None)  # a call would fail
    assert run(*command, "--compile-cache", "none") == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tasks", "letters", "--system", "x"], "--system needs --chat"),
        (["--tasks", "letters", "--limit", "0"], "--limit must be at least 1, got 0"),
        (["--tasks", "letters", "--num_fewshot", "-1"], "--num-fewshot must be at least 0, got -1"),
        (["--tasks", "letters", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--tasks", "letters", "--data", "/nowhere"], "--data must be a folder, got /nowhere"),
        (["--tasks", "letters", "--cache", "full", "--against", "full"], "has the name and budget of the cache that is scored"),
        (
            ["--tasks", "letters", "--cache", "clustered", "--cache-option", "reuse=3", "--against", "clustered"],
            "--against clustered has the name and budget of the cache that is scored: expected another cache or --budget",
        ),
        (["--tasks", "letters", "--against", "no"], "no"),
        (["--tasks", "letters", "--include-path", "/nowhere"], "--include-path"),
        (["--tasks", "letters", "--compare", "."], "--compare reads runs that are there, and runs none: leave --tasks out"),
        (["--compare", "/nowhere"], "/nowhere has no results.json"),
        ([], "--tasks NAMES is needed"),
        (["--tasks", "letters", "--processes", "2"], "--processes needs --coordinator HOST:PORT"),
        (["--compare", ".", "--coordinator", "a:1"], "--compare runs in one process: leave --coordinator out"),
        (["--tasks", "letters", "--ray", "auto", "--coordinator", "a:1"], "--ray runs in one process: leave --coordinator out"),
        (["--tasks", "niah", "--lengths", "1k"], "--lengths must be whole numbers, comma-separated, got '1k'"),
        (["--tasks", "niah", "--lengths", "0"], "--lengths must be at least 1, got 0"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") <= 2 and "Traceback" not in error


def test_an_output_that_cannot_be_written_is_one_line_before_the_model_loads(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "loaded", None)  # a call would fail
    (taken := tmp_path / "file").write_text("mine")
    assert run("--tasks", "letters", "--cache", "full", "--output", taken) == 2
    assert capsys.readouterr().err == f"icejax evaluate: error: --output {taken} cannot be written: Not a directory\n"
    assert run("--tasks", "letters", "--cache", "full", "--output", "/proc/none") == 2
    assert (
        capsys.readouterr().err == "icejax evaluate: error: --output /proc/none cannot be written: No such file or directory\n"
    )
    assert taken.read_text() == "mine"


def test_answers_of_another_version_or_with_other_special_tokens_are_refused(tmp_path, bundled, monkeypatch):
    model, tokenizer = bundled
    arguments = evaluate.parser("icejax evaluate").parse_args(["--tasks", "letters", "--output", str(tmp_path)])
    evaluate.harness_model(arguments, model, tokenizer, ON_DEVICE).answers.close()
    evaluate.harness_model(arguments, model, tokenizer, ON_DEVICE).answers.close()
    other = copy.deepcopy(tokenizer)
    backend, end = other.backend_tokenizer, tokenizer.eos_token
    backend.post_processor = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, tokenizer.eos_token_id)])
    with pytest.raises(InputError, match="another model, cache, context length or version"):
        evaluate.harness_model(arguments, model, other, ON_DEVICE)
    monkeypatch.setattr(evaluate, "__version__", "0.0.1")
    with pytest.raises(InputError, match="another model, cache, context length or version"):
        evaluate.harness_model(arguments, model, tokenizer, ON_DEVICE)


@pytest.mark.slow
def test_a_task_that_nobody_has_and_missing_data(tmp_path, capsys):
    assert run("--tasks", "no_such_task", "--output", tmp_path / "a") == 2
    assert "no task is named no_such_task" in capsys.readouterr().err
    assert run("--tasks", "gsm8k", "--data", tmp_path, "--output", tmp_path / "a") == 2
    assert "--data has no train-head.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["lm_eval", "matplotlib"])
def test_without_a_package_a_line_says_what_to_install(monkeypatch, capsys, missing):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else name)
    assert run("--tasks", "gsm8k") == 2
    error = capsys.readouterr().err
    assert "pip install 'icejax[evaluate]'" in error and missing.replace("_", "-") in error
