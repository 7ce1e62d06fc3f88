"""How a command line is typed: short options, the prompt as a plain argument, another chat template, a revision."""

import io
import shutil
import sys

import pytest

from icejax.api.generate import ASSETS
from icejax.checks.errors import InputError
from icejax.commands import chat, loading
from icejax.commands import convert as converting
from icejax.commands import generate as command
from icejax.commands.options import parser
from icejax.commands.requests import read_prompts
from tests.helpers.commands import SHORT, run


@pytest.mark.parametrize(
    "line, prompts",
    [
        (["a b"], ["a b"]),
        (["-m", "M", "a b"], ["a b"]),
        (["a b", "-m", "M", "-n", "3"], ["a b"]),
        (["-m", "M", "--json", "--", "-a"], ["-a"]),
        (["-p", "a", "-p", "b"], ["a", "b"]),
        (["-"], ["typed"]),
    ],
)
def test_prompts_are_typed_as_elsewhere(line, prompts, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"typed")))
    assert [read.prompt for read in read_prompts(parser("x").parse_args(line))] == prompts


def test_short_options_are_the_long_ones():
    short, long = (["-m", "M", "-n", "3", "-p", "a"], ["--model", "M", "--max-new-tokens", "3", "--prompt", "a"])
    assert vars(parser("x").parse_args(short)) == vars(parser("x").parse_args(long))


def test_a_plain_prompt_is_answered(capsys, bundled, monkeypatch):
    monkeypatch.setattr(command, "load", lambda *_: bundled)
    expected = run(capsys, "--prompt", "import os\n", *SHORT)
    assert expected[0] == 0 and run(capsys, "import os\n", *SHORT) == expected


@pytest.mark.parametrize(
    "line, message",
    [
        (["a", "b"], "expected one prompt where a plain argument is given, got 'a' and 'b': put a prompt of several words in quotes, or give each prompt as --prompt TEXT"),
        (["-p", "a", "b"], "expected one prompt where a plain argument is given, got 'b' and 'a': put a prompt of several words in quotes, or give each prompt as --prompt TEXT"),
        (["a", "-n", "3", "b"], "unrecognized arguments: b (are quotes missing?)"),
        (["a", "--max-tokens", "3"], "unrecognized arguments: --max-tokens 3 (did you mean --max-new-tokens?)"),
        (["a", "--revision", "v1"], "assets is a folder, and only a hub id has revisions: leave revision v1 out"),
        (["a", "--chat-template", "/no/such"], "--chat-template needs --chat, or 'messages' in a .jsonl file: no prompt is put into a template"),
        (["a", "--chat", "--chat-template", "/no/such"], "/no/such cannot be read: No such file or directory"),
        pytest.param(["a", "--chat", "--chat-template", "/dev/zero"], "/dev/zero is no chat template: expected at most 1048576 bytes of Jinja, found more", marks=pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/zero")),
    ],
)  # fmt: skip
def test_what_was_typed_wrong_is_told_in_one_line(capsys, line, message):
    status, out, err = run(capsys, *line, *SHORT)
    assert (status, out, err.count("\n")) == (2, "", 1) and err.endswith(f"{message}\n")


def test_another_chat_template_is_used(capsys, tmp_path, monkeypatch):
    """A file of --chat-template takes the place of the folder's; a broken one is told."""
    shutil.copytree(ASSETS, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ raise_exception('the folder has its own') }}")
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    prompts = []

    def record(model, tokenizer, requests, **_):
        prompts.extend(request.prompt for request in requests)
        raise InputError("seen")

    monkeypatch.setattr("icejax.api.jobs.encode_prompts", record)
    options = ["--model", str(tmp_path / "model"), "--chat-template", str(tmp_path / "mine.jinja"), *SHORT]
    assert run(capsys, "hello", "--chat", *options)[2] == "icejax.generate: error: seen\n"
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "b"}]}')
    assert run(capsys, "--prompt-file", str(tmp_path / "p.jsonl"), *options)[2] == "icejax.generate: error: seen\n"
    assert prompts == ["<hello>", "<b>"]
    (tmp_path / "mine.jinja").write_text("{% for %}")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert chat.main(options) == 2
    err = capsys.readouterr().err
    assert err.startswith("icejax chat: error: the tokenizer's chat template ") and err.count("\n") == 1


def test_a_revision_reaches_the_hub(capsys, monkeypatch):
    asked = []

    def seen(source, *, revision, **_):
        asked.append((source, revision))
        raise InputError("seen")

    monkeypatch.setattr(loading.generate, "resolve", seen)
    monkeypatch.setattr(converting, "resolve", seen)
    assert run(capsys, "-m", "org/name", "--revision", "v1", "x", *SHORT)[0] == 2
    assert converting.main(["org/name", "target", "--revision", "v2"], name="icejax convert") == 2
    assert asked == [("org/name", "v1"), ("org/name", "v2")]
