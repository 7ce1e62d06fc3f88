"""`bench.texts`: texts of any tokenizer have the tokens asked for, and their questions have the true continuations."""

import json

import pytest
import transformers

from bench import texts
from bench.needle import task
from icejax.checks.errors import InputError
from tests.helpers import small_tokenizers

WORDS = tuple("ĠThe Ġfunction Ġof Ġmodule Ġwritten Ġagain def Ġ=".split())


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Two tokenizers of bytes and some words; `begins` puts a `<s>` in front of texts."""
    by_name = {}
    for name in ("words", "begins"):
        raw = small_tokenizers.byte_level(WORDS)
        if name == "begins":
            begin = [dict(SpecialToken=dict(id="<s>", type_id=0)), dict(Sequence=dict(id="A", type_id=0))]
            special = {"<s>": dict(id="<s>", ids=[raw["model"]["vocab"]["<s>"]], tokens=["<s>"])}
            raw["post_processor"] = dict(type="TemplateProcessing", single=begin, pair=begin, special_tokens=special)
        path = tmp_path_factory.mktemp(name) / "tokenizer.json"
        path.write_text(json.dumps(raw))
        by_name[name] = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), clean_up_tokenization_spaces=False)
    return by_name


@pytest.mark.parametrize("name", ["words", "begins"])
@pytest.mark.parametrize("task_name", texts.TASKS)
def test_a_text_holds_the_answers_to_its_questions(tokenizers, name, task_name):
    tokenizer, seen = tokenizers[name], []
    for number in range(3):
        found = texts.document(tokenizer, task_name, tokens=6000, number=number)
        assert found == texts.document(tokenizer, task_name, tokens=6000, number=number)
        assert len(found.tokens) == 6000 and len(found.questions) == texts.QUESTIONS
        assert (tokenizer.decode(found.tokens[:1]) == "<s>") == (name == "begins")
        text = tokenizer.decode(found.tokens)
        for question in found.questions:
            asked, continuation = tokenizer.decode(question.tokens), tokenizer.decode(question.continuation)
            assert len(question.tokens) + len(question.continuation) <= texts.LONGEST
            if task_name == "function":
                first, _, head = asked.partition("\n")
                assert first.startswith("# The function ") and first.endswith(", written again:")
                assert len(question.continuation) == texts.CONTINUED
            else:
                head = asked
                assert continuation[0] == " " and continuation[1:6].isdigit() and continuation[6:] == "\n"
            assert text.count(head + continuation) == 1
        seen.append(text)
    assert len(set(seen)) == 3


def test_values_of_a_text_have_different_names(tokenizers):
    text = tokenizers["words"].decode(texts.document(tokenizers["words"], "value", tokens=3000, number=5).tokens)
    names = [
        line.partition(" = ")[0]
        for line in text.splitlines()
        if line.split(" ")[0] in texts.WORDS[0] and line[-5:].isdigit() and " = " in line
    ]
    assert len(names) == len(set(names)) == texts.LINES


def test_a_prompt_ends_in_its_question(tokenizers):
    tokenizer = tokenizers["words"]
    prompt, answer = texts.prompt(tokenizer, "value", length=2048, number=0)
    text = tokenizer.decode(prompt)
    line = text.splitlines()[-1]
    assert len(prompt) <= 2048 and line.endswith(" =") and len(answer) <= texts.CAPTURED
    assert line + tokenizer.decode(answer) in text[: -len(line)]


def test_an_excerpt_is_real_text(tokenizers):
    for kind in task.KINDS:
        ids = texts.excerpt(tokenizers["words"], kind, tokens=700, seed=1)
        assert len(ids) == 700 and tokenizers["words"].decode(ids).encode() in task.corpus("heldout", kind)
    with pytest.raises(InputError, match="--lengths must be at most the [0-9]+ tokens of prose that there are, got 90000000"):
        texts.excerpt(tokenizers["words"], "prose", tokens=90_000_000, seed=0)


def test_functions_are_those_of_the_module():
    import bisect
    import inspect

    by_name = {function.name: function for function in texts.functions("bisect.py")}
    function = by_name["insort_left"]
    assert function.module == "bisect" and function.source.startswith("def insort_left(a, x, lo=0, hi=None, *, key=None):")
    assert function.before + function.source + function.behind in inspect.getsource(bisect)
    assert {*by_name} == {"insort_right", "bisect_right", "insort_left", "bisect_left"}


def test_too_long_a_text_is_refused(tokenizers, monkeypatch):
    monkeypatch.setattr(texts, "_paths", lambda: ("bisect.py", "this.py"))
    with pytest.raises(
        InputError,
        match="too few questions of at most 64 tokens, answers included, for a text of 9000 tokens: take a shorter text",
    ):
        texts.document(tokenizers["words"], "function", tokens=9000, number=0)
