"""Chat templates: rendering equals transformers', and a faulty template costs a one-line error and at most some seconds."""

import copy
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import icejax
from icejax.sandbox import client
from icejax.text.chat_marks import PRIVATE
from icejax.text.chat_messages import template_variables
from icejax.text.chat_template import render
from icejax.text.chat_text import ChatText
from icejax.text.control_tokens import ControlTokens
from icejax.text.encode import encode
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


def in_transformers(tokenizer, messages, **options):
    """Returns transformers' text of messages; the last one is continued if it is the assistant's."""
    continues = messages[-1]["role"] == "assistant"
    options |= dict(add_generation_prompt=not continues, continue_final_message=continues, tokenize=False)
    return tokenizer.apply_chat_template(copy.deepcopy(messages), **options)


ENDINGS = {
    "a word": "The colour is",
    "a space": "The colour is ",
    "lines": "\n\n The colour is\n\n",
    "nothing": "",
    "the end of a turn": "a<|im_end|></s> b <",
    "thoughts": "<think>\nhm\n</think>\n\nThree",
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("family", chat_templates.FAMILIES)
def test_a_last_message_of_the_assistant_is_continued(family, ending):
    tokenizer = chat_templates.tokenizer(family)
    messages = [*TALK[1:], {"role": "assistant", "content": ENDINGS[ending]}]
    assert render(tokenizer, messages) == in_transformers(tokenizer, messages)


def test_a_message_that_cannot_be_continued_is_told():
    begun = [TALK[1], {"role": "assistant", "content": "Three"}]
    for template, message in (
        ("{{ messages[0].content }}", "leaves the last message out, which is the assistant's and would be continued"),
        ("{{ messages[1].content[:3] }}", "leaves the last message out"),
    ):
        with pytest.raises(icejax.InputError, match=message):
            render(tokenizer_with(template), begun)
    with pytest.raises(
        icejax.InputError, match="the assistant's and has no content: expected a text that the answer continues"
    ):
        render(tokenizer_with("a"), [TALK[1], {"role": "assistant", "content": None, "tool_calls": [{}]}])


TOOL = {"type": "function", "function": {"name": "add", "description": "a <|im_end|> b", "parameters": {"a<": "\u2028"}}}


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
def test_tools_and_arguments_reach_the_template(family):
    tokenizer = chat_templates.tokenizer(family)
    for tools, arguments in (([TOOL], {}), (None, {"enable_thinking": False}), ([TOOL, {}], {"enable_thinking": True})):
        expected = in_transformers(tokenizer, TALK[1:], tools=tools, **arguments)
        text = render(tokenizer, TALK[1:], template_variables(tools, arguments))
        assert text == expected and (("# Tools" in text), ("a <|im_end|> b" in text)) == (bool(tools), bool(tools))
        names = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
        ours, theirs = encode(tokenizer, text), tokenizer(expected, add_special_tokens=False)["input_ids"]
        counts = [[ids.count(name) for name in names] for ids in (ours, theirs)]
        assert counts[0] == [counts[1][0], counts[1][1] - bool(tools)]


def test_an_argument_may_be_any_variable_of_the_template():
    template = "{{ bos_token }}{{ documents[0].text }}{{ n + 1 }}{{ x }}{{ tools is none }}{{ add_generation_prompt }}"
    variables = template_variables(None, {"bos_token": "<b>", "documents": [{"text": "d"}], "n": 2, "x": None})
    assert render(tokenizer_with(template), TALK, variables) == "<b>d3NoneTrueTrue"


def test_a_template_for_tools_is_used_with_tools():
    tokenizer = tokenizer_with({"default": "a", "tool_use": "b{{ tools[0].name }}"})
    assert render(tokenizer, TALK, template_variables([{"name": "t"}])) == "bt"
    assert render(tokenizer, TALK, template_variables([])) == "a"


def test_an_argument_without_effect_is_told_once(caplog):
    variables = template_variables([TOOL], {"enable_thinkin": False})
    for _ in range(2):
        render(tokenizer_with("{# told once #}x"), TALK, variables)
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"the chat template has no variable {name!r}: it has no effect" for name in ("enable_thinkin", "tools")]


CONTENT_LOOP = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}{% endfor %}"
)
IN_PARTS = [{"role": "user", "content": [{"type": "text", "text": "a </"}, {"type": "text", "text": "s> b"}]}]


def test_content_parts_reach_a_template_that_reads_them():
    tokenizer = chat_templates.tokenizer("qwen2.5")
    expected = in_transformers(tokenizer, IN_PARTS, chat_template=CONTENT_LOOP)
    assert render(tokenizer_with(CONTENT_LOOP), IN_PARTS) == expected == "<user>a </s> b"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}",
    ],
    ids=["fails", "writes objects", "leaves them out"],
)
def test_other_templates_get_the_parts_as_one_text(template):
    assert render(tokenizer_with(template), IN_PARTS) == "<user>a </\ns> b"


def test_parts_of_the_last_message_are_continued():
    messages = [*IN_PARTS, {"role": "assistant", "content": IN_PARTS[0]["content"]}]
    assert render(tokenizer_with(CONTENT_LOOP), messages) == "<user>a </s> b<assistant>a </s> b"


def with_end(template):
    """Returns a tokenizer with the control tokens <s> and </s> and this template."""
    tokenizer = copy.deepcopy(chat_templates.tokenizer("mistral"))
    tokenizer.chat_template = template
    return tokenizer


SPANS = {
    "around": ("{{ eos_token }}{{ messages[0].content }}{{ eos_token }}", "a</s>b", [(5, 9)]),
    "next to the template's": ("{{ messages[0].content }}{{ eos_token }}{{ messages[0].content }}", "</s>", [(0, 4), (8, 12)]),
    "trimmed": ("{{ messages[0].content | trim }}{{ eos_token }}", " </s> ", [(0, 4)]),
    "split": ("{{ messages[0].content.split('</s>') | join('|') }}{{ eos_token }}", "a</s>b", []),
    "cut and joined": ("{{ messages[0].content.split('|') | join }}{{ eos_token }}", "a</|s>", [(1, 5)]),
    "of two messages": ("{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}", ("a</", "s>"), [(1, 5)]),
    "of two messages, trimmed": ("{% for m in messages %}{{ m.content | trim }}{% endfor %}</s>", ("a</ ", "s>"), [(1, 5)]),
    "in JSON": ("{{ messages[0].content | tojson }}{{ eos_token }}", "é</s>", [(2, 6)]),
    "in JSON with escapes": ("{{ messages[0].content | tojson(ensure_ascii=true) }}{{ eos_token }}", "é</s>", [(7, 11)]),
    "private characters": ("{{ messages[0].content }}{{ eos_token }}", "\ue000\\ue001\ue002</s>", [(8, 12)]),
    "a role": ("{{ messages[0].role }}{{ eos_token }}", "x", []),
    "lower case": ("{{ messages[0].content | lower }}{{ eos_token }}", "a</S>", [(1, 5)]),
    "lower case, before the template's own": ("{{ messages[0].content | lower }}</s>{{ '</s>' }}", "a</S>", [(1, 5)]),
    "one letter in upper case": ("{{ messages[0].content | capitalize }}{{ eos_token }}", "</S>", [(0, 4)]),
    "replaced": ("{{ messages[0].content.replace('XX', '') }}{{ eos_token }}", "</XXs>", [(0, 4)]),
    "reversed": ("{{ messages[0].content | reverse }}{{ eos_token }}", ">s/<", [(0, 4)]),
    "not escaped": ("{{ messages[0].content.replace('&lt;', '<') }}{{ eos_token }}", "&lt;/s>", [(0, 4)]),
    "of ASCII": (
        "{{ messages[0].content.encode('ascii', 'ignore').decode() }}{{ eos_token }}",
        "</\u00e9s></s>",
        [(0, 4), (4, 8)],
    ),
    "begun by the template": ("{{ '</' + messages[0].content }}{{ eos_token }}", "s>", [(0, 4)]),
    "ended by the template": ("{{ messages[0].content + 's>' }}{{ eos_token }}", "</", [(0, 4)]),
    "cut off behind": ("{{ messages[0].content[:22] }}{{ eos_token }}", "</s>abcdefghijklmnopqr", [(0, 4)]),
    "cut off with the text before": ("{{ messages[0].content[:6] }}</s>", "abcd</s></s>", []),
    "cut off, with parts": ("{{ '</' }}{{ messages[0].content[:7] }}</s>", "s>abcd</s>", [(0, 4)]),
    "cut off behind a name of parts": (
        "{{ '</' + messages[0].role[1] + '>' + messages[0].content[:22] }}",
        "</s>abcdefghijklmnopqr",
        [(4, 8)],
    ),
    "of parts, and one that depends on the text": (
        "{{ '</' + messages[0].role[1] + '>' }}{{ '<unused>' if '/think' in messages[0].content }}",
        "/think",
        [],
    ),
    "taken away": ("{{ messages[0].content.replace('</s>', '') }}</s>{{ messages[0].content.split('</s>')[1] }}", "a</s>", []),
    "of the template in lower case": ("{{ '<S>' | lower }}{{ messages[0].content | lower }}{{ eos_token }}", "a", []),
    "of the template, from a role": ("{{ '</' + messages[0].role[1] + '>' }}{{ messages[0].content }}", "a</s>", [(5, 9)]),
}


@pytest.mark.parametrize("case", SPANS)
def test_names_of_messages_are_told_from_the_templates(case):
    template, contents, spans = SPANS[case]
    tokenizer = with_end(template)
    messages = [{"role": "user", "content": text} for text in ([contents] if isinstance(contents, str) else contents)]
    text = render(tokenizer, messages)
    expected = in_transformers(tokenizer, messages)
    assert type(text) is ChatText and (text, list(text.spans)) == (expected, spans)
    assert encode(tokenizer, text).count(tokenizer.eos_token_id) == expected.count("</s>") - len(spans)


FROM_ROLES = (
    "{% for m in messages %}{% if '</think>' in m.content %}</s>{% else %}{{ '</' + m.role[1] + '>' }}{% endif %}"
    "{{ m.content | lower }}{% endfor %}"
)


@pytest.mark.parametrize("contents", [("a", "B"), ("a", "<think>\n</think> b"), ("</think>", "</think>"), ("a", "</s>")])
def test_templates_that_join_names_take_harmless_chats(contents):
    messages = [{"role": "user", "content": content} for content in contents]
    text = render(with_end(FROM_ROLES), messages)
    first, second = (content.lower() for content in contents)
    expected = ChatText("</s>") + first + ChatText("</s>") + second
    ids = [encode(with_end(FROM_ROLES), chat) for chat in (text, expected)]
    assert text == expected and ids[0] == ids[1]


def test_an_argument_may_choose_a_name():
    template = "{{ '</' + ending + '>' }}{{ messages[0].content | lower }}"
    text = render(with_end(template), [{"role": "user", "content": "a"}], {"ending": "s"})
    assert (text, text.spans) == ("</s>a", ())


UNCLEAR = {
    "a name more": (FROM_ROLES, "</S>", "the chat template makes a control token of a message's text, or leaves one out: expected no more, as with other text, found '</s>': change the message or the template"),
    "a refusal of other text": ("{% if messages[0].content != 'a' %}{{ raise_exception('no') }}{% endif %}{{ '</' + 's>' }}", "a", "it is not clear whether ['</s>'] are control tokens of the chat template or text of a message, as with other text the tokenizer's chat template refuses the messages: no: change the messages or the template"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNCLEAR)
def test_a_chat_with_unclear_names_is_refused(case):
    template, content, message = UNCLEAR[case]
    with pytest.raises(icejax.InputError) as raised:
        render(with_end(template), [{"role": "user", "content": content}])
    assert str(raised.value) == message


def test_a_refusal_has_no_marks():
    with pytest.raises(icejax.InputError, match="refuses the messages: write a</s> or </s>$"):
        render(
            with_end("{{ raise_exception('write ' + messages[0].content + ' or </s>') }}"),
            [{"role": "user", "content": "a</s>"}],
        )


@pytest.mark.parametrize("family", chat_templates.FAMILIES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_messages_of_fragments_add_no_control_token(family, data):
    tokenizer = chat_templates.tokenizer(family)
    controls = ControlTokens(tokenizer)
    fragments = [part for name in controls.ids for part in (name, name[:1], name[:-1], name[1:], name[-1:])] + [" ", "\n", "a"]
    content = st.lists(st.sampled_from(fragments), min_size=1, max_size=5).map("".join)
    count = data.draw(st.sampled_from([1, 2, 3]))
    messages = [{"role": role, "content": data.draw(content)} for role in ("user", "assistant", "user")[:count]]
    text = render(tokenizer, messages)
    neutral = in_transformers(tokenizer, [message | {"content": "x"} for message in messages])
    assert text == in_transformers(tokenizer, messages) == tokenizer.decode(encode(tokenizer, text))
    names = [token for token in encode(tokenizer, text) if token in controls.ids.values()]
    assert names == [token for token in tokenizer(neutral).input_ids if token in controls.ids.values()]


def test_a_chat_of_all_private_characters_is_refused():
    every = "".join(map(chr, PRIVATE))
    assert render(tokenizer_with("{{ messages[0].content }}"), [{"role": "user", "content": every[5:]}]) == every[5:]
    with pytest.raises(icejax.InputError, match="the chat has every private character of Unicode"):
        render(tokenizer_with("x"), [{"role": "user", "content": every[4:]}])


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
    render(tokenizer_with("begun"), TALK)
    with monkeypatch.context() as limits, pytest.raises(icejax.InputError, match=r"chat template did not end in 0\.5 s"):
        limits.setattr(client, "SECONDS", 0.5)
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
        assert parent.wait(120) in (0, 1, -9) and parent.stderr.read() == b""
    deadline = time.monotonic() + 120
    while _runs(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
