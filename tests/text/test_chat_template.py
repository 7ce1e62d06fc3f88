"""Chat templates: rendering equals transformers', and a faulty template costs a one-line error and at most some seconds."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

import icejax
from icejax.sandbox import client
from icejax.text.chat_template import render
from tests.helpers import chat_templates

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": ' What is <1 & "2"\'s é\u2028 \n'},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n Three.\n"},
    {"role": "user", "content": "Why?"},
]


def tokenizer_with(template):
    """Returns a stand-in for a tokenizer with this chat template."""
    return SimpleNamespace(chat_template=template, special_tokens_map={"bos_token": "<s>"})


@pytest.mark.parametrize("family", chat_templates.FAMILIES)
def test_the_text_is_that_of_transformers(family):
    tokenizer = chat_templates.tokenizer(family)
    talk = TALK if chat_templates.FAMILIES[family].system else TALK[1:]
    for messages in (talk, talk[:-2], TALK[1:], TALK[1:2]):
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert render(tokenizer, messages) == expected
    if talk is not TALK:
        with pytest.raises(icejax.InputError, match="template refuses the messages: (System role not|Conversation roles must)"):
            render(tokenizer, TALK)


PARTS = {
    "tags and blocks": "{% for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}\n{{ m.role }}{% break %}\n{% endfor %}",
    "an answer": "{% set x = 1 %}{% generation %}{% set x = 2 %}[{{ messages[0].content }}]{{ x }}{% endgeneration %}{{ x }}",
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2, sort_keys=true, ensure_ascii=true, separators=(',', ':')) }}",
    "variables": "{{ bos_token }}{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ eos_token is defined }}",
    "namespace and dict": "{% set n = namespace(a=1, self=2) %}{% set n.b = 3 %}{{ n.a + n.b }}{{ dict(a=1) }}{{ dict.fromkeys('ab') }}",
    "the day": "{{ strftime_now('%Y-%m-%d') }}",
}


@pytest.mark.parametrize("part", PARTS)
def test_all_that_a_template_may_use_is_as_in_transformers(bundled, part):
    expected = bundled[1].apply_chat_template(TALK, chat_template=PARTS[part], add_generation_prompt=True, tokenize=False)
    special_tokens = bundled[1].special_tokens_map
    assert render(SimpleNamespace(chat_template=PARTS[part], special_tokens_map=special_tokens), TALK) == expected


def test_a_special_token_may_have_the_name_of_a_variable():
    tokenizer = SimpleNamespace(chat_template="{{ tools is none }}{{ messages[0].role }}{{ x }}", special_tokens_map={})
    tokenizer.special_tokens_map = {"tools": "<t>", "messages": "<m>", "x": "<x>"}
    assert render(tokenizer, TALK) == "Truesystem<x>"


def test_named_templates_and_the_time_of_a_conversation():
    assert render(tokenizer_with({"default": "a", "tool_use": "b"}), TALK) == "a"
    assert render(
        tokenizer_with("{{ strftime_now('%d %b %Y %H') }}"), TALK, now=time.mktime((2024, 2, 29, 7, 0, 0, 0, 0, -1))
    ) == ("29 Feb 2024 07")


FAULTS = {
    "none": (None, "the tokenizer has no chat template"),
    "no default": ({"rag": "a", "tool_use": "b"}, "chat templates are rag, tool_use: expected one named default"),
    "names that are no text": ({1: "a", None: "b"}, "chat templates are 1, None: expected one named default"),
    "no text": (["a"], "chat template must be text, found a list"),
    "refusal": ("{{ raise_exception('only\nuser turns') }}", "refuses the messages: only user turns"),
    "division": ("{{ 1 / 0 }}", "fails: division by zero"),
    "types": ("{{ messages + 1 }}", "fails: can only concatenate list"),
    "syntax": ("{% if %}", "fails: Expected an expression"),
    "undefined": ("{{ no.such }}", "fails: 'no' is undefined"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails: maximum recursion depth exceeded"),
    "depth": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "fails: maximum recursion depth exceeded"),
    "memory": ("{{ 'x' * 10 ** 10 }}", "took more than 1 GiB of memory"),
    "length": ("{% for _ in range(99999) %}{{ 'x' * 999 }}{% endfor %}", r"wrote more than \d+ characters"),
    "escape": ("{{ ''.__class__.__mro__ }}", "fails: access to attribute '__class__' of 'str' object is unsafe"),
    "format": ("{{ '{0.__class__.__mro__}'.format(1) }}", "fails: access to attribute '__class__' of 'int'"),
    "attr": ("{{ (messages | attr('__class__')).__mro__ }}", "fails: access to attribute '__class__' of 'list'"),
    "namespace": ("{{ namespace(__class__=1) }}", "fails: a namespace takes no name that begins with an underscore"),
    "namespace set": ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "fails: a namespace takes no name"),
    "change": ("{{ messages.append(1) }}", "fails: access to attribute 'append' of 'list' object is unsafe"),
    "range": ("{{ range(10 ** 9) | length }}", "fails: Range too big"),
    "include": ("{% include '/etc/passwd' %}", "fails: no loader for this environment"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_template_that_fails_is_told_in_one_line(capfd, fault):
    template, message = FAULTS[fault]
    with pytest.raises(icejax.InputError, match=message) as raised:
        render(tokenizer_with(template), TALK)
    assert "\n" not in str(raised.value)
    assert render(tokenizer_with("as before"), TALK) == "as before"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "template",
    ["{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{{ 9 ** (9 ** 9) }}"],
    ids=["loops", "one long operation"],
)
def test_a_template_that_does_not_end_is_ended(monkeypatch, template):
    monkeypatch.setattr(client, "SECONDS", 0.5)
    render(tokenizer_with("begun"), TALK)
    with pytest.raises(icejax.InputError, match=r"chat template did not end in 0\.5 s"):
        render(tokenizer_with(template), TALK)
    assert render(tokenizer_with("as before"), TALK) == "as before"


def test_a_process_that_is_gone_is_told_and_started_again(monkeypatch):
    render(tokenizer_with("begun"), TALK)
    process = client.SANDBOX._process
    monkeypatch.setattr(process, "poll", lambda: None)  # the process ends right after the check
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(icejax.InputError, match="fails: the process that runs it ended with status -9"):
        render(tokenizer_with("x"), TALK)
    monkeypatch.undo()
    assert render(tokenizer_with("as before"), TALK) == "as before"


def test_an_interrupted_rendering_leaves_nothing_for_the_next(monkeypatch):
    render(tokenizer_with("begun"), TALK)
    process = client.SANDBOX._process

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(process, "stdout", SimpleNamespace(readline=interrupted, close=process.stdout.close))
        render(tokenizer_with("an answer that nobody reads"), TALK)
    assert render(tokenizer_with("the next"), TALK) == "the next" and process.returncode == -signal.SIGKILL


PARENT = """
import os, sys
from types import SimpleNamespace
from icejax.text import chat_template
from icejax.sandbox import client
chat_template.render(SimpleNamespace(chat_template="x", special_tokens_map={}), [])
print(client.SANDBOX._process.pid, flush=True)
if sys.argv[1] == "wait":
    sys.stdin.read()
elif sys.argv[1] == "hang":
    from threading import Timer
    client.SECONDS = 0.5
    Timer(0.2, lambda: os._exit(1)).start()
    chat_template.render(SimpleNamespace(chat_template="{{ 9 ** (9 ** 9) }}", special_tokens_map={}), [])
"""


@pytest.mark.parametrize("way", ["end", "wait", "hang"])
def test_the_process_does_not_outlive_its_parent(way):
    """Whether the parent ends, is killed, or exits while a template runs."""
    with subprocess.Popen([sys.executable, "-c", PARENT, way], stdin=-1, stdout=-1, stderr=-1) as parent:
        child = int(parent.stdout.readline())
        assert os.getsid(child) == child  # Ctrl-C in a terminal does not reach the child
        if way == "wait":
            parent.kill()
        assert parent.wait(20) in (0, 1, -9) and parent.stderr.read() == b""
    deadline = time.monotonic() + 20
    while _runs(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
