"""Thoughts come apart from the answer: in marks, in harmony, piece by piece and in a chat's history."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from icejax.cache.registry import Clustered
from icejax.engine.decode.counters import NOTHING
from icejax.engine.decode.row import Row
from icejax.session.session import Session
from icejax.text.chat_template import render
from icejax.text.reasoning import Marked, Parts, Whole, splitter
from tests.helpers import chat_templates
from tests.text.test_chat_turns import Scripted

# The parts of gpt-oss's published template that matter: a stored answer is a final message, and tags in it are refused.
HARMONY = """{{- '<|start|>system<|message|>You are a model.\n\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if '<|channel|>analysis<|message|>' in m.content or '<|channel|>final<|message|>' in m.content %}
{{- raise_exception('tags in the content') }}{%- endif %}
{%- if loop.last and m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
SPECIAL = "startoftext endoftext return constrain channel start end message call".split()
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.fixture(scope="module")
def harmony():
    """A tokenizer of bytes with gpt-oss's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|return|>", chat_template=HARMONY)


def split(tokenizer, prompt, answer):
    """Returns the answer's parts token by token, and the row."""
    ends = (tokenizer.convert_tokens_to_ids("<|return|>"), tokenizer.convert_tokens_to_ids("<|call|>"))
    ids = tokenizer(answer, add_special_tokens=False).input_ids
    row = Row(tokenizer, (), ends, tokenizer(prompt, add_special_tokens=False).input_ids, len(ids))
    return [row.take(NOTHING._replace(token=token)) for token in ids], row


ANSWERS = {  # the end of the prompt, the answer, its text and its reasoning
    "thoughts and answer": ("<|start|>assistant", ANALYSIS + "Hm, é.<|end|>" + FINAL + "Hello!<|return|>", "Hello!", "Hm, é."),
    "no thoughts": ("<|start|>assistant", FINAL.removeprefix("<|start|>assistant") + "Hello!<|return|>", "Hello!", None),
    "cut in the thoughts": ("<|start|>assistant", ANALYSIS + "Hm, 日", "", "Hm, 日"),
    "cut in a header": ("<|start|>assistant", "<|channel|>anal", "", None),
    "no channels": ("<|start|>assistant", "Hello, to= you<|return|>", "Hello, to= you", None),
    "an answer that begins as a recipient": ("<|start|>assistant", "together<|return|>", "together", None),
    "thoughts begun by the prompt": ("<|start|>assistant" + ANALYSIS, "Hm.<|end|>" + FINAL + "4<|return|>", "4", "Hm."),
    "an answer begun by the prompt": (FINAL + "It", " is.<|return|>", " is.", None),
    "a header begun by the prompt": ("<|start|>assistant<|channel|>", "analysis<|message|>Hm.<|end|>", "", "Hm."),
    "two thoughts": ("<|start|>assistant", ANALYSIS + "a<|end|><|start|>assistant" + ANALYSIS + "b<|end|>" + FINAL + "c", "c", "a\n\nb"),
    "a preamble": ("<|start|>assistant", "<|channel|>commentary<|message|>I look.<|end|>" + FINAL + "4", "I look.\n\n4", None),
    "a tool call": ("<|start|>assistant", ' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>', 'to=functions.f {"a": 1}', None),
    "a tool call behind the channel": ("<|start|>assistant", "<|channel|>commentary to=f <|constrain|>json<|message|>{}<|call|>", "to=f {}", None),
    "a plain prompt": ("1 + 3 =", " 4", " 4", None),
    "a closed message": ("<|start|>user<|message|>hi<|end|>", "4" + FINAL + "5", "4\n\n5", None),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_channels_come_apart(harmony, case):
    prompt, answer, text, reasoning = ANSWERS[case]
    pieces, row = split(harmony, prompt, answer)
    whole = Parts()
    for piece in pieces:
        whole = whole.plus(piece)
    assert whole == (text, reasoning)
    assert row.holds_more == (reasoning is not None or "<|message|>" in answer or "<|channel|>" in answer)


def test_channels_stream_as_they_come(harmony):
    pieces, _ = split(harmony, "<|start|>assistant", ANALYSIS + "Hm<|end|>" + FINAL + "Hi<|return|>")
    assert [piece for piece in pieces if piece.text or piece.reasoning] == [("", "H"), ("", "m"), ("H", None), ("i", None)]


def marked(text, inside):
    """Returns text and reasoning of a whole answer with `<think>` marks."""
    start = text.lstrip()
    if not inside and not start.startswith("<think>"):
        return text, None
    thoughts, _, answer = (text if inside else start.removeprefix("<think>")).partition("</think>")
    return answer.lstrip(), thoughts.strip()


PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "</", "th", "ink>", " ", "\n", "a", "é", "<think", "</think"]), max_size=12
)


@given(pieces=PIECES, inside=st.booleans())
def test_marked_thoughts_are_those_of_the_whole_text(pieces, inside):
    parser, whole = Marked("<think>", "</think>", inside=inside), Parts()
    for piece in pieces:
        whole = whole.plus(parser.take(piece))
    expected = marked("".join(pieces), inside)
    whole = whole.plus(parser.rest())
    assert (whole.text, whole.reasoning or None) == (expected[0], expected[1] or None)
    assert parser.apart == (expected[1] is not None)


def test_thoughts_stream_without_the_spaces_around_them():
    parser = Marked("<think>", "</think>", inside=False)
    pieces = ["\n<thi", "nk>", "\n", "A", " sum", ".\n", "</thi", "nk>\n", "\n", "4", " \n"]
    assert [tuple(parser.take(piece)) for piece in pieces] == [
        ("", None), ("", ""), ("", ""), ("", "A"), ("", " sum"), ("", "."), ("", ""), ("", ""), ("", None), ("4", None), (" \n", None)
    ]  # fmt: skip


def test_special_marks_and_marks_of_the_prompt_count():
    added = {1: SimpleNamespace(content="[THINK]", special=True), 2: SimpleNamespace(content="[/THINK]", special=True)}
    names = {1: "[THINK]", 2: "[/THINK]"}

    def decode(tokens, skip_special_tokens=True, **_):
        return "".join(chr(token) if token > 9 else names[token] * (not skip_special_tokens) for token in tokens)

    tokenizer = SimpleNamespace(added_tokens_decoder=added, decode=decode)

    def answer(prompt, ids):
        row, whole = Row(tokenizer, (), (), prompt, len(ids)), Parts()
        for token in ids:
            whole = whole.plus(row.take(NOTHING._replace(token=token)))
        return whole

    assert answer([65], [1, 66, 2, 67, 1, 68]) == ("CD", "B")
    assert answer([65, 1, 10], [66, 2, 67]) == ("C", "B")
    assert answer([1, 65], [66]) == ("B", None)


def test_who_knows_no_marks_writes_them_as_text(bundled):
    tokenizer = bundled[1]
    assert type(splitter(tokenizer, [1])) is Whole
    assert type(splitter(chat_templates.tokenizer("qwen3"), [1])) is Marked


def test_a_harmony_chat_keeps_no_thoughts(harmony, monkeypatch):
    scripted = Scripted(monkeypatch, harmony)
    session = Session(scripted.model, harmony, cache=Clustered())
    answer = harmony(ANALYSIS + "They greet me.<|end|>" + FINAL + "Hello!<|return|>").input_ids
    scripted.answers, messages = [answer] * 3, []
    for question in ("hi", "and now?", "and then?"):
        messages.append(dict(role="user", content=question))
        list(session.stream_chat(question))
        assert harmony.decode(session.token_ids[: -len(answer)]) == render(harmony, messages)
        messages.append(dict(role="assistant", content="Hello!"))
        assert session.messages[-1] == messages[-1] | {"reasoning": "They greet me."}
    assert len(scripted.prefilled) == 3


def test_templates_read_thoughts_by_three_names():
    template = "{% for m in messages %}{{ m.reasoning }}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}"
    tokenizer = SimpleNamespace(chat_template=template, special_tokens_map={})
    assert render(tokenizer, [dict(role="assistant", content="c", reasoning="r"), dict(role="user", content="")]) == "rrr"
    assert render(tokenizer, [dict(role="user", content="c")]) == ""
