"""`bench.humaneval`: prompts, which part of an answer is run, the written completions, and pass@1."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

import icejax
from bench import humaneval, weights
from icejax.sandbox import programs
from tests.helpers import chat_templates, families

RAW = dict(
    task_id="Test/0",
    prompt='def add(a, b):\n    """Returns their sum.\n    >>> add(1, 2)\n    3\n    """\n',
    entry_point="add",
    canonical_solution="    return a + b\n",
    test="def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n",
)  # fmt: skip
LINE = "--weights plain --caches full --batches 2 --prompt-tokens 512 --steps 1 --repeats 1 --questions 1 --pieces 1"


@pytest.fixture
def file(tmp_path):
    (tmp_path / "problems.jsonl").write_text("\n".join(json.dumps(RAW | dict(task_id=f"Test/{i}")) for i in range(3)) + "\n\n")
    return tmp_path / "problems.jsonl"


def test_a_completion_ends_with_the_function(file):
    problems = humaneval.read(str(file))
    zipped = file.with_suffix(".jsonl.gz")
    zipped.write_bytes(gzip.compress(file.read_bytes()))
    assert problems == humaneval.read(str(zipped)) and [problem.task_id for problem in problems] == [
        "Test/0",
        "Test/1",
        "Test/2",
    ]
    assert humaneval.cut("    return 1\n\nprint(1)\ndef f():\n") == "    return 1\n"
    assert (
        humaneval.cut("    if a:\n        return 1  # so\n    return 2\n")
        == "    if a:\n        return 1  # so\n    return 2\n"
    )
    assert humaneval.last_block("so\n```python\na\n```\nno:\n```python\nb = 1\n```\n") == "\nb = 1\n"
    assert humaneval.last_block("```\nunfinished") == "\nunfinished" and humaneval.last_block("nothing") == ""
    namespace = {}
    for completion in (
        RAW["canonical_solution"],
        "\ndef add(a, b):\n    return a + b",
    ):  # the body alone, or the whole function
        exec(problems[0].program(completion), namespace)
    for bad_completion in ("    return a - b", "", "return"):
        with pytest.raises((AssertionError, SyntaxError)):
            exec(problems[0].program(bad_completion), namespace)


@pytest.mark.slow
def test_passes_are_counted(file, tmp_path, sandbox):
    problems, out = humaneval.read(str(file)), tmp_path / "a" / "b.jsonl"
    completions = ["    return a + b\n", "    return a\n", "    import os; os._exit(0)\n"]
    row = humaneval.score(zip(problems, completions, strict=True), out, run_code=True)
    # 1 of 3: the interval of the textbook (Wilson 1927), by the roots of (p - 1/3)^2 = z^2 p (1 - p) / 3.
    assert row == dict(pass_at_1=0.3333, low=0.0615, high=0.7923, problems=3, completions=str(out), ran=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["task_id"], line["completion"]) for line in lines] == [
        (f"Test/{i}", text) for i, text in enumerate(completions)
    ]
    assert [line["result"] for line in lines] == ["passed", "failed", "failed"]


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_the_first_space_of_a_line_is_kept(chat, monkeypatch):
    """The tokenizer drops one space at the start of a text, as Llama 2's does."""
    words = ["▁", "▁▁▁▁", "return", "▁1", "\n", "def", "```", "python", "<user>", "<end>"]
    word_level = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="▁"))
    word_level.normalizer, word_level.decoder = (
        normalizers.Replace(" ", "▁"),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    )
    word_level.add_tokens([AddedToken(word, normalized=False) for word in words if word != "▁"])
    tokenizer, calls = PreTrainedTokenizerFast(tokenizer_object=word_level), []
    tokenizer.chat_template = "<user>{{ messages[0]['content'] }}<end>"
    answer = ["▁▁▁▁", "return", "▁1", "\n", "def"]
    if chat:
        answer = ["python", "```", "python", "\n", *answer, "\n", "```", "▁"]

    def generate(model, tokenizer, prompts, **options):
        calls.append((prompts, options["stop"]))
        return [SimpleNamespace(token_ids=[words.index(word) for word in answer])] * len(prompts)

    monkeypatch.setattr(icejax, "generate", generate)
    problem = humaneval.Problem("Test/0", "def\n▁▁▁▁", "f", "")
    settings = humaneval.Asking(chat=chat, new_tokens=9, batch=2)
    completions = [text for _, text in humaneval.complete(None, tokenizer, [problem] * 3, None, settings)]
    assert completions == (["\n    return 1\ndef\n"] if chat else ["    return 1"]) * 3
    assert [len(prompts) for prompts, _ in calls] == [2, 1]
    assert all((stop == humaneval.STOPS) != chat for _, stop in calls)


@pytest.mark.slow
def test_the_row_says_that_nothing_ran(file, tmp_path, capsys, monkeypatch):
    """The tokenizer is not of bytes. The completions equal those of `generate`."""
    monkeypatch.setattr(programs, "run", None)
    folder = tmp_path / "model"
    hf_model = families.build(families.row("llama-gqa"), vocab_size=300, max_position_embeddings=2048)
    model, tokenizer = families.load(hf_model, folder), chat_templates.tokenizer("qwen2.5")
    tokenizer.save_pretrained(folder)
    options = f"--model {folder} --humaneval {file} --new-tokens 4 --completions {tmp_path / 'out'}"
    assert weights.main(f"{LINE} {options}".split()) == 0
    out, err = capsys.readouterr()
    (row,) = map(json.loads, out.splitlines())
    written = tmp_path / "out" / "model-float32-full.jsonl"
    assert row["humaneval"] == dict(pass_at_1=None, problems=3, completions=str(written), ran=False)
    assert row["perplexity"] is row["needle"] is None and row["tokens_per_s"] > 0 and "not run" in err
    assert row["model"] == "model"
    assert row["left_out"] == "perplexity and pass keys are of byte tokens, this tokenizer has others"
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    assert [line["task_id"] for line in lines] == ["Test/0", "Test/1", "Test/2"] and lines[0]["result"] == "not run"
    (expected,) = icejax.generate(model, tokenizer, RAW["prompt"], cache=icejax.Full(), max_new_tokens=4, stop=humaneval.STOPS)
    assert lines[0]["completion"] == lines[2]["completion"] == expected.text


@pytest.mark.parametrize(
    "line, message",
    [
        ("--run-code", "--run-code runs what a model writes for --humaneval: give its file too"),
        ("--shape llama-3.2-1b --humaneval FILE", "--humaneval asks a model that has learned something: give --model instead of --shape"),
        ("--humaneval nowhere.jsonl", "--humaneval nowhere.jsonl: expected the JSON lines of HumanEval, plain or .gz: [Errno 2]"),
        ("--humaneval FILE.gz", "--humaneval FILE.gz: expected the JSON lines of HumanEval, plain or .gz: Not a gzipped file"),
        ("--humaneval EMPTY", "--humaneval EMPTY is empty: expected the JSON lines of HumanEval"),
        ("--humaneval BROKEN", "--humaneval BROKEN, line 2: not valid JSON (Expecting property name"),
        ("--humaneval OTHER", "--humaneval OTHER, line 1: expected task_id, prompt, entry_point, test, all of them text"),
        ("--humaneval FILE --new-tokens 0", "--new-tokens must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_bad_options_are_one_line(file, tmp_path, capsys, line, message):
    Path(f"{file}.gz").write_bytes(file.read_bytes())
    contents = {"EMPTY": "\n", "BROKEN": json.dumps(RAW) + "\n{", "OTHER": json.dumps(RAW | dict(test=1))}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
        line, message = (text.replace(name, str(tmp_path / name)) for text in (line, message))
    line, message = (text.replace("FILE", str(file)) for text in (line, message))
    _refused(capsys, line, message)


def test_no_code_is_run_where_it_is_not_safe(file, capsys, monkeypatch):
    def unsafe(program):
        raise programs.Unsafe("no Landlock")

    refused = "--run-code has no way to run programs safely here: {}; without it completions are only written"
    monkeypatch.setattr(programs, "run", unsafe)
    _refused(capsys, f"--run-code --humaneval {file}", refused.format("no Landlock"))
    monkeypatch.setattr(programs, "run", lambda program: "failed")
    missing = "a program that only imports of the standard library failed"
    _refused(capsys, f"--run-code --humaneval {file}", refused.format(missing))


def _refused(capsys, line: str, message: str) -> None:
    with pytest.raises(SystemExit) as end:
        weights.main(line.split())
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and err.startswith(f"python -m bench.weights: error: {message}"), err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_completions_that_cannot_be_written_are_one_line(file, tmp_path, capsys):
    _refused(
        capsys,
        f"{LINE} --humaneval {file} --completions {file}",
        f"--completions: {file}/bundled-float32-full.jsonl cannot be written:",
    )
