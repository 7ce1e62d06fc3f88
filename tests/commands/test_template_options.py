"""Options of the chat template: arguments, tools, parts and control tokens, on the command line, per line and in Python."""

import json
import shutil

import pytest

import icejax
from icejax.api.generate import ASSETS
from icejax.api.prompts import encode_prompts
from icejax.checks.errors import InputError
from icejax.commands import chat
from icejax.commands import generate as command
from icejax.commands.options import chat_parser, parser, template_arguments
from icejax.session.session import Session
from tests.helpers.commands import SHORT, run

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}{{ [a, b, tools] | tojson }}"
SHOWN = "<user>x<eos>"


@pytest.fixture
def model(tmp_path):
    """A folder of the bundled model with a chat template that shows its arguments."""
    shutil.copytree(ASSETS, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% set a = a | default(0) %}{% set b = b | default(0) %}" + TEMPLATE
    )
    return str(tmp_path / "model")


@pytest.fixture
def prompts(monkeypatch):
    """The prompts of a command line, which ends before they run."""
    seen = []

    def record(model, tokenizer, requests, *, parse_special, **_):
        seen.extend((str(request.prompt), parse_special) for request in requests)
        raise InputError("seen")

    monkeypatch.setattr(command, "stream_generate", record)
    return seen


@pytest.mark.parametrize("parser_of", [parser, chat_parser])
def test_a_template_argument_is_json_or_text(parser_of):
    texts = dict(a="false", b="3", c="x", d='"3"', e="[1, {}]", f="", g="a=b", h="{", i="null", j="[" * 99999)
    line = [part for name, text in texts.items() for part in ("--template-arg", f"{name}={text}")]
    values = template_arguments(parser_of("x").parse_args(line))
    assert values == dict(a=False, b=3, c="x", d="3", e=[1, {}], f="", g="a=b", h="{", i=None, j="[" * 99999)


def test_arguments_and_tools_reach_the_template(capsys, tmp_path, model, prompts):
    message, tool = {"role": "user", "content": [{"type": "text", "text": "x"}]}, {"name": "t"}
    lines = [
        {"messages": [message], "tools": [tool], "chat_template_kwargs": {"b": None}},
        {"messages": [message], "chat_template_kwargs": {"a": True}},
        {"messages": [message], "tools": []},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ["--prompt-file", str(tmp_path / "p.jsonl"), "--template-arg", "a=false", "--template-arg", "b=x", *SHORT]
    assert run(capsys, "-m", model, *options)[2] == "icejax.generate: error: seen\n"
    shown = ['[false, null, [{"name": "t"}]]', '[true, "x", null]', '[false, "x", null]']
    assert prompts == [(SHOWN + line, False) for line in shown]
    prompts.clear()
    run(capsys, "-m", model, "--chat", "-p", "x", "--template-arg", "a=1", "--parse-special", *SHORT)
    assert prompts == [(f"{SHOWN}[1, 0, null]", True)]


LINE = {"messages": [{"role": "user", "content": "x"}]}
WRONG = {
    "no value": (["-p", "x", "--chat", "--template-arg", "a"], None, "--template-arg takes KEY=VALUE, such as enable_thinking=false, got 'a'"),
    "no name": (["-p", "x", "--chat", "--template-arg", "=1"], None, "'' cannot be an argument of a chat template: expected letters, digits and underscores"),
    "reserved": (["-p", "x", "--chat", "--template-arg", "messages=1"], None, "'messages' cannot be an argument of a chat template: icejax sets it"),
    "no template": (["-p", "x", "--template-arg", "a=1"], None, "--template-arg needs --chat, or 'messages' in a .jsonl file: no prompt is put into a template"),
    "a plain prompt": ([], {"prompt": "x", "tools": [{}]}, "'tools' of a line needs 'messages' or --chat: the prompt is not put into a template"),
    "arguments of a plain prompt": ([], {"prompt": "x", "chat_template_kwargs": {"a": 1}}, "'chat_template_kwargs' of a line needs 'messages' or --chat: the prompt is not put into a template"),
    "arguments that are none": ([], LINE | {"chat_template_kwargs": [1]}, "p.jsonl, line 1: chat_template_kwargs must be an object of names and values, got [1]"),
    "tools that are none": ([], LINE | {"tools": "add"}, "p.jsonl, line 1: tools must be a list of objects, got 'add'"),
    "an image": ([], {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "p.jsonl, line 1: 'messages': a content has a part of type 'image': expected text, the only type that is read"),
    "a session": (["--chat", "--session", "/no/such"], {"prompt": "x", "tools": [{}]}, "'tools' of a line cannot change a session: give --template-arg when the session begins"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_of_a_template_are_told_in_one_line(capsys, tmp_path, case):
    line, content, message = WRONG[case]
    if content is not None:
        (tmp_path / "p.jsonl").write_text(json.dumps(content))
        line = [*line, "--prompt-file", str(tmp_path / "p.jsonl")]
    status, out, err = run(capsys, *line, *SHORT)
    assert (status, out, err.count("\n")) == (2, "", 1) and err.endswith(f"{message}\n")


def test_chat_tells_wrong_options_before_it_loads(capsys):
    assert chat.main(["-m", "/no/such", "--template-arg", "a"], name="icejax chat") == 2
    message = "--template-arg takes KEY=VALUE, such as enable_thinking=false, got 'a'"
    assert capsys.readouterr() == ("", f"icejax chat: error: {message}\n")


@pytest.mark.slow
def test_a_session_keeps_its_template_arguments(capsys, tmp_path, model):
    line = ["-m", model, "--chat", "--session", str(tmp_path / "kept"), *SHORT]
    short = ["--context-length", "300"]
    assert run(capsys, *line, *short, "--quiet", "-p", "x", "--template-arg", "a=7")[::2] == (0, "")
    assert run(capsys, *line, "-p", "y")[0] == 0
    loaded = icejax.load(model)
    session = Session.load(tmp_path / "kept", *loaded)
    assert session.template_variables == {"a": 7} == session.fresh_copy().template_variables
    assert loaded[1].decode(session.token_ids).count("[7, 0, null]") == 1  # the end of this template is rewritten at each turn
    status, out, err = run(capsys, *line, "-p", "z", "--template-arg", "a=8")
    message = "a session's template arguments are set when it begins: leave --template-arg out"
    assert (status, out, err) == (2, "", f"icejax.generate: error: {message}\n")
    assert run(capsys, *line, "-p", "z", "--template-arg", "a=7")[0] == 0


def ids_of(bundled, prompt, **options):
    return encode_prompts(bundled[0], bundled[1], [icejax.Request(prompt=prompt, index=0, **options)])[0]


def test_names_in_prompts_are_text_and_are_told(bundled, caplog):
    eos, text = bundled[1].eos_token_id, "import <eos> os"
    plain = [token for letter in text for token in bundled[1](letter)["input_ids"]]
    assert ids_of(bundled, text) == plain and eos not in plain
    assert [record.getMessage() for record in caplog.records] == [
        "prompt 1 has the name of the control token '<eos>', which is read as text: "
        "parse_special=True (--parse-special) makes it the token"
    ]
    assert ids_of(bundled, text, parse_special=True) == bundled[1](text)["input_ids"] and len(caplog.records) == 1
    for value in ("no", 1):
        with pytest.raises(icejax.InputError, match="parse_special must be true or false, got "):
            icejax.Request(prompt="x", parse_special=value)


def test_a_chat_needs_no_option_for_its_special_tokens(bundled, monkeypatch, caplog):
    monkeypatch.setattr(bundled[1], "chat_template", "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    eos, chat = bundled[1].eos_token_id, icejax.chat(bundled[1], "a<eos>")
    assert ids_of(bundled, chat).count(eos) == 1 and ids_of(bundled, chat, parse_special=True).count(eos) == 2
    begun = icejax.chat(bundled[1], [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<eos>"}], system="s")
    assert begun == "s<eos>a<eos>b<eos>" and ids_of(bundled, begun).count(eos) == 2 and not caplog.records
    assert ids_of(bundled, begun + "<eos>").count(eos) == 2


def test_api_options_of_a_template(bundled, monkeypatch):
    monkeypatch.setattr(bundled[1], "chat_template", TEMPLATE)
    options = dict(tools=[{"name": "t"}], chat_template_kwargs={"a": 1, "b": "x"})
    text = icejax.chat(bundled[1], "x", **options)
    assert text == f'{SHOWN}[1, "x", [{{"name": "t"}}]]'
    session = Session(*bundled, context_length=200, cache=icejax.Full(), **options)
    session.chat("x", max_new_tokens=1)
    assert session.token_ids[:-1] == ids_of(bundled, text)
