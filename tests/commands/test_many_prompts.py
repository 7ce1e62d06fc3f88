"""Answers of a prompt file in a file that grows: shares, a run that continues, and refusals."""

import errno
import json
import os

import pytest

import icejax
from icejax.cache.registry import Full
from icejax.checks.errors import InputError
from icejax.commands.many import answerer, output, run
from icejax.files.whole_lines import WholeLines
from tests.helpers.commands import run as command

PROMPTS = [{"id": "a", "prompt": "import os\n"}, {"prompt": "def f(", "max_new_tokens": 2}, {"id": 7, "prompt": "x = 1\n"}]
OPTIONS = ["--cache", "full", "--max-new-tokens", "4", "--temperature", "1.5", "--compile-cache", "none"]


@pytest.fixture
def files(tmp_path):
    """The prompt file, whose lines stand between blank ones, and the place of the answers."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n\n".join(json.dumps(prompt) for prompt in PROMPTS) + "\n")
    return prompts, tmp_path / "answers.jsonl"


@pytest.fixture
def asked(monkeypatch):
    """What a stand-in for the model has been asked, as indices; its answer is the prompt."""
    asked = []

    class Echo:
        def __init__(self, arguments, console):
            self.arguments = arguments

        def answers(self, some, phases):
            asked.append([line.index for line in some])
            prompts = run.lines.prompts(self.arguments, some, run.lines.reader(self.arguments))
            for line, prompt in zip(some, prompts, strict=True):
                yield line, {"text": prompt.prompt}

    monkeypatch.setattr(run, "Answerer", Echo)
    return asked


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_answers_of_shares_are_those_of_a_batch_of_all(capsys, files, bundled, monkeypatch):
    monkeypatch.setattr(answerer, "load", lambda *_: bundled)
    prompts, answers = files
    for share in ("1/2", "0/2"):
        assert command(capsys, "-f", str(prompts), "-o", str(answers), "--shard", share, *OPTIONS)[:2] == (0, "")
    requests = [icejax.Request(prompt=p["prompt"], max_new_tokens=p.get("max_new_tokens")) for p in PROMPTS]
    options = dict(cache=Full(), max_new_tokens=4, sampling=icejax.Sampling(temperature=1.5))
    expected = {1 + 2 * i: list(r.token_ids) for i, r in enumerate(icejax.generate(*bundled, requests, **options))}
    assert {line["line"]: line["token_ids"] for line in lines(answers)} == expected
    assert {line["line"]: line.get("id") for line in lines(answers)} == {1: "a", 3: None, 5: 7}


def test_shares_are_the_whole_and_a_run_goes_on(capsys, files, asked):
    prompts, answers = files
    flags = ["-f", str(prompts), "-o", str(answers), "--batch-size", "1"]
    told = f"{answers}: 1 lines of shard 1/2 are answered, 0 of them before\n"
    assert command(capsys, *flags, "--shard", "1/2") == (0, "", told)
    with answers.open("ab") as file:
        file.write(b'{"line": 1, "key": "00')  # a writer was killed
    assert command(capsys, *flags) == (0, "", f"{answers}: 3 lines are answered, 1 of them before\n")
    assert asked == [[1], [0, 2]]
    assert [(line["line"], line["text"]) for line in lines(answers)] == [(3, "def f("), (1, "import os\n"), (5, "x = 1\n")]
    assert command(capsys, *flags, "--quiet") == (0, "", "") and len(asked) == 2


def test_lines_in_memory_at_once_are_few(capsys, files, asked, monkeypatch):
    monkeypatch.setattr(run, "TOGETHER", 2)
    assert command(capsys, "-f", str(files[0]), "-o", str(files[1]), "--batch-size", "1")[0] == 0
    assert asked == [[0, 1], [2]]


def test_what_is_not_theirs_is_refused_and_stays(capsys, files, asked):
    prompts, answers = files
    flags = ["-f", str(prompts), "-o", str(answers)]
    assert command(capsys, *flags, "--shard", "2/4")[0] == 0
    before = answers.read_bytes()
    other = (
        f"{answers} has 1 answers to other lines, or with another model, cache or options: give another --output, "
        "or the prompt file and options of then"
    )
    assert command(capsys, *flags, "--temperature", "0.5") == (2, "", f"icejax.generate: error: {other}\n")
    prompts.write_text(prompts.read_text().replace("x = 1", "x = 2"))
    assert command(capsys, *flags) == (2, "", f"icejax.generate: error: {other}\n")
    with output.opened(answers):
        told = f"{answers} is being written by another process: wait for it, or give another --output"
        assert command(capsys, *flags) == (2, "", f"icejax.generate: error: {told}\n")
    assert answers.read_bytes() == before
    for text in ("mine", '{"line": 1, "text": "no key"}\n', '{"line": 1\n'):
        answers.write_text(text)
        told = f"{answers} is no file of answers: give another --output, or remove it"
        assert command(capsys, *flags) == (2, "", f"icejax.generate: error: {told}\n")
        assert answers.read_text() == text
    os.mkfifo(prompts.with_name("pipe.jsonl"))
    told = f"--output reads lines a second time, and {prompts.parent}/pipe.jsonl is no file: give a file"
    assert command(capsys, "-f", f"{prompts.parent}/pipe.jsonl", *flags[2:]) == (2, "", f"icejax.generate: error: {told}\n")
    told = f"{prompts.parent} cannot be used: Is a directory"
    assert command(capsys, *flags[:3], str(prompts.parent)) == (2, "", f"icejax.generate: error: {told}\n")
    prompts.write_text('{"prompt": "a"}\n{"prompt": 1}\n')
    answers.unlink()
    assert command(capsys, *flags)[2].endswith("line 2: 'prompt' must be text, got 1\n") and not answers.exists()
    assert len(asked) == 1


def test_a_full_disk_is_one_line(capsys, files, asked, monkeypatch):
    prompts, answers = files
    add, added = WholeLines.add, []

    def full(self, line):
        added.append(line)
        if len(added) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add(self, line)

    monkeypatch.setattr(WholeLines, "add", full)
    told = f"{answers} cannot be written: No space left on device; what was written before is kept"
    flags = ["-f", str(prompts), "-o", str(answers), "--batch-size", "1"]
    assert command(capsys, *flags) == (2, "", f"icejax.generate: error: {told}\n")
    assert len(lines(answers)) == 1 and command(capsys, *flags)[0] == 0 and len(lines(answers)) == 3


def test_a_file_that_changes_under_a_run_is_told(files):
    prompts, _ = files
    arguments = run.options.parser("x").parse_args(["-f", str(prompts), *OPTIONS])
    found = run.lines.read(arguments).all
    assert [(line.number, line.index) for line in found] == [(1, 0), (3, 1), (5, 2)]
    read_at = run.lines.reader(arguments)
    assert [line.prompt for line in run.lines.prompts(arguments, found[1:], read_at)] == ["def f(", "x = 1\n"]
    prompts.write_text(prompts.read_text().replace("def", "fed"))
    with pytest.raises(InputError, match="changed since the run began, in line 3: begin the run again"):
        list(run.lines.prompts(arguments, found, read_at))


def test_parquet_files_are_read_and_written(capsys, tmp_path, asked):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow"), pytest.importorskip("pyarrow")
    prompts, answers = tmp_path / "prompts.parquet", tmp_path / "answers.parquet"
    chat = [{"role": "user", "content": "Hi", "name": None}]
    table = [*PROMPTS[:2], {"messages": chat, "id": "c"}, {"prompt": "last", "id": None}]
    table = [line | ({"id": str(line["id"])} if line.get("id") else {}) for line in table]
    message = pyarrow.struct([(name, pyarrow.string()) for name in ("role", "content", "name")])
    columns = [("id", pyarrow.string()), ("prompt", pyarrow.string()), ("messages", pyarrow.list_(message))]
    columns = pyarrow.schema([*columns, ("max_new_tokens", pyarrow.int64())])
    parquet.write_table(pyarrow.Table.from_pylist(table, columns), prompts, row_group_size=3)  # the last row has its own group
    flags = ["-f", str(prompts), "-o", str(answers), "--shard", "0/2"]
    told = f"{answers}: 2 lines of shard 0/2 are answered, 0 of them before\n"
    assert command(capsys, *flags) == (0, "", told)
    found = parquet.read_table(answers).to_pylist()
    assert [(row["line"], row["text"]) for row in found] == [(1, "import os\n"), (3, None)]
    assert command(capsys, *flags[:4])[0] == 0 and asked == [[0, 2], [1, 3]]
    assert [row["text"] for row in parquet.read_table(answers).to_pylist()] == ["import os\n", None, "def f(", "last"]
    parquet.write_table(parquet.read_table(answers)[:1], answers)  # as after a run that was killed before it wrote all
    assert command(capsys, *flags[:4], "--quiet")[0] == 0 and len(asked) == 2 and parquet.read_table(answers).num_rows == 4
    message = f"{prompts} is no file of answers: give another --output"
    before = prompts.read_bytes()
    assert command(capsys, "-f", str(prompts), "-o", str(prompts)) == (2, "", f"icejax.generate: error: {message}\n")
    assert prompts.read_bytes() == before
    prompts.write_text("no table")
    assert f"error: {prompts} cannot be read as a Parquet file: " in command(capsys, *flags)[2]


def test_a_damaged_parquet_file_is_one_line(capsys, tmp_path, asked):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow"), pytest.importorskip("pyarrow")
    prompts = tmp_path / "prompts.parquet"
    no_text = pyarrow.array([b"\xff"], pyarrow.binary()).cast(pyarrow.string(), safe=False)
    parquet.write_table(pyarrow.table({"prompt": no_text}), prompts)
    status, out, err = command(capsys, "-f", str(prompts), "-o", str(tmp_path / "answers.jsonl"))
    assert (status, out, err.count("\n")) == (2, "", 1) and f"error: {prompts} cannot be read as a Parquet file: " in err


def test_rows_of_a_parquet_file_are_read_once(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    from icejax.commands.many import parquet

    opened, path = [], tmp_path / "prompts.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [str(i) for i in range(600)]}), path)
    real = parquet._opened
    monkeypatch.setattr(parquet, "_opened", lambda path: opened.append(path) or real(path))
    rows = parquet.Rows(path)
    assert [json.loads(rows.text_at(place))["prompt"] for place in (0, 5, 300, 599)] == ["0", "5", "300", "599"]
    assert len(opened) == 1 and rows.text_at(4) == '{"prompt": "4"}' and len(opened) == 2
    with pytest.raises(InputError, match="has fewer rows: begin the run again"):
        rows.text_at(600)


def test_a_line_that_the_template_refuses_is_named(capsys, files, bundled, monkeypatch):
    monkeypatch.setattr(answerer, "load", lambda *_: bundled)
    prompts, answers = files
    prompts.write_text('\n{"prompt": ""}\n')
    line = f"icejax.generate: error: {prompts}, line 2: a message is empty: expected some text\n"
    assert command(capsys, "-f", str(prompts), "-o", str(answers), "--chat", "--quiet", *OPTIONS) == (2, "", line)
    prompts.write_text('{"prompt": "\\ud800"}\n')
    line = f"icejax.generate: error: {prompts}, line 1: 'prompt' must be Unicode text: it has half of a surrogate pair\n"
    assert command(capsys, "-f", str(prompts), "-o", str(answers), *OPTIONS) == (2, "", line)


REFUSED = {
    "--shard needs --output: the answers go into a file, a line each": ["-p", "a", "--shard", "0/2"],
    "--ray needs --output: the answers go into a file, a line each": ["-p", "a", "--ray", "auto"],
    "--ray-workers needs --ray ADDRESS": ["-f", "a.jsonl", "-o", "b", "--ray-workers", "2"],
    "--output has an answer for each line of a .jsonl or .parquet file: give one as --prompt-file, and no prompt": ["-p", "a", "-o", "b"],
    "--output is a file of JSON lines for prompts that are independent: leave --session out": ["-f", "a.jsonl", "-o", "b", "--session", "s"],
    "--shard must be I/N, such as 0/4, got '1'": ["-f", "a.jsonl", "-o", "b", "--shard", "1"],
    "I of --shard I/N must be at most 1, got 2": ["-f", "a.jsonl", "-o", "b", "--shard", "2/2"],
    "N of --shard I/N must be at least 1, got 0": ["-f", "a.jsonl", "-o", "b", "--shard", "0/0"],
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_options_that_do_not_go_together_are_refused(capsys, message):
    assert command(capsys, *REFUSED[message]) == (2, "", f"icejax.generate: error: {message}\n")
