"""Generated tasks: lengths, places and answers of their samples, and their scorers by values worked out by hand."""

import gzip
import importlib
import inspect
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from icejax.checks.errors import InputError

pytest.importorskip("lm_eval")
from icejax.evaluation.generated import find_function, library, niah, perplexity, similarity, turns  # noqa: E402
from icejax.evaluation.setting import TEMPLATE, Setting  # noqa: E402

WORD = re.compile(r"\w+|\W")


def words(text: str, add_special_tokens: bool = True) -> list[str]:
    """A tokenizer: words and single other characters, behind a token that begins a text."""
    return ["<s>"] * add_special_tokens + WORD.findall(text)


def setting(*, context_length: int = 8192, **options) -> Setting:
    return Setting(SimpleNamespace(tok_encode=words, max_length=context_length), **options)


def test_the_needle_stands_at_its_depth_and_a_prompt_fills_its_length():
    hay = niah.Haystack(setting(), most=4096)
    for length in (1024, 4096):
        room = length - niah.ANSWER_TOKENS - TEMPLATE - len(words(f" {niah.BEGUN}", False))
        for depth in (0, 30, 100):
            prompt = hay.prompt(length, depth)
            assert room - 250 < len(words(prompt)) <= room  # a sentence is shorter than 250 tokens
            assert prompt.count(niah.ANSWER) == 1
            book = prompt.partition("<book> ")[2].partition(" </book>")[0]
            before, _, behind = book.partition(niah.NEEDLE)
            share = 100 * len(words(before)) / (len(words(before)) + len(words(behind)))
            assert share == pytest.approx(depth, abs=100 * 250 / room)
            assert not before or not behind or before[-1] in ".!?" or behind[:2] == "\n\n"


def test_the_score_of_a_needle_is_the_share_of_the_answers_words():
    for answer, score in (
        (" Eat a sandwich and sit in Dolores Park on a sunny day.", 1),
        (" eat a sandwich", 3 / 11),
        (" Sandwiches in Dolores Park, day", 2 / 11),  # "in" and "dolores"; a word has its comma
        ("", 0),
    ):
        assert niah.score(answer) == pytest.approx(score)


def test_the_haystack_is_the_essays_where_the_data_has_them(tmp_path):
    file = tmp_path / niah.ESSAYS
    assert niah.prose(tmp_path) == niah.prose(None) and "assert" in niah.prose(None)
    file.parent.mkdir(parents=True)
    file.write_bytes(gzip.compress(json.dumps(dict(text="One. Two! Three? " * 9)).encode()))
    prompt = niah.Haystack(setting(data=tmp_path), most=1024).prompt(1024, 50)  # far longer than the essays
    assert prompt.count("Two!") > 9
    for damaged in (b"", b"\x1f\x8b\x08", gzip.compress(b"[]"), gzip.compress(b'{"text": ""}'), gzip.compress(b'{"text": 3}')):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match="is no file of essays"):
            niah.prose(tmp_path)


def test_lengths_outside_the_context_are_refused():
    assert setting(context_length=3000).lengths_for("niah", (1024, 2048, 4096), least=512) == [1024, 2048]
    assert setting(lengths=(700, 600)).lengths_for("niah", (1024,), least=512) == [700, 600]
    for options, message in (
        (dict(lengths=(1024, 9000)), "needs --lengths from 512 to the context of 8192, got 1024, 9000"),
        (dict(lengths=(511,)), "needs --lengths from 512 to the context of 8192, got 511"),
        (dict(context_length=1000), "needs --lengths from 512 to the context of 1000$"),
    ):
        with pytest.raises(InputError, match=message):
            setting(**options).lengths_for("niah", (1024, 2048), least=512)


def documented(function: library.Function) -> str:
    module = importlib.import_module(function.path.removesuffix(".py").replace("/", "."))
    return " ".join(inspect.getdoc(getattr(module, function.name)).split())


def test_a_function_is_asked_for_by_its_docstring_which_the_text_leaves_out():
    for length, depth in ((2048, 15), (4096, 85)):
        code, target = find_function._sample(setting(), length, depth)
        prompt = find_function.prompt(code.text, target.description)
        assert len(words(prompt + find_function.BEGUN)) <= length - find_function.ANSWER_TOKENS - TEMPLATE
        assert prompt.count(target.source) == 1 and target.name not in target.description.split()
        assert target.description == documented(target)
        assert target.description not in code.text and '"""' not in code.text
        end = len(words(code.text[: code.text.index(target.source)])) / len(words(code.text))
        assert abs(100 * end - depth) < find_function.NEAR + 20  # the function itself stands before its end


def test_the_three_functions_of_a_conversation_differ_and_fit():
    for number in range(3):
        code, functions = turns._sample(setting(), 4096, number)
        assert len({function.name for function in functions}) == turns.TURNS
        assert all(code.text.count(function.source) == 1 for function in functions)
        questions = [turns.QUESTION.format(function.name, function.path) for function in functions]
        answers = [turns.BEGUN + function.source + turns.END for function in functions]
        assert len(words(code.text + "".join(questions + answers))) < 4096 - TEMPLATE
        assert max(len(words(question)) for question in questions) < turns.QUESTION_TOKENS
        places = [code.text.index(function.source) for function in functions]
        assert places[1] < places[0] and places[2] < places[0]
    assert turns._sample(setting(), 4096, 1) != turns._sample(setting(), 4096, 2)


def test_a_template_of_more_tokens_leaves_less_room():
    one = setting(chat_tokens=700)
    prompt = niah.Haystack(one, most=4096).prompt(4096, 50)
    assert len(words(prompt)) + len(words(f" {niah.BEGUN}", False)) + 700 + niah.ANSWER_TOKENS <= 4096
    code, target = find_function._sample(one, 4096, 15)
    prompt = find_function.prompt(code.text, target.description) + find_function.BEGUN
    assert len(words(prompt)) + 700 + find_function.ANSWER_TOKENS <= 4096
    code, _ = turns._sample(one, 4096, 0)
    assert len(words(code.text)) + turns.TURNS * (turns.ANSWER_TOKENS + turns.QUESTION_TOKENS) + 700 <= 4096
    assert one.lengths_for("niah", (1024, 2048), least=512) == [2048]
    with pytest.raises(InputError, match="the task niah needs --lengths from 1148 to the context of 8192, got 1024"):
        setting(chat_tokens=700, lengths=(1024,)).lengths_for("niah", (1024,), least=512)


def test_a_library_without_such_functions_is_told(monkeypatch):
    monkeypatch.setattr(library, "paths", lambda: ("json/tool.py",))
    with pytest.raises(
        InputError, match=r"^Python's standard library has only \d+ tokens of functions: --lengths must be at most"
    ):
        library.excerpt(setting(), tokens=10**6, number=0)
    nothing = library.Excerpt((), np.zeros(0))
    monkeypatch.setattr(find_function, "excerpt", lambda *_, **__: nothing)
    monkeypatch.setattr(turns, "excerpt", lambda *_, **__: nothing)
    with pytest.raises(InputError, match="has no described function for a text of 2048 tokens: give longer --lengths$"):
        find_function._sample(setting(), 2048, 15)
    with pytest.raises(
        InputError, match="^a text of 2048 tokens has fewer than 3 functions to ask for: give longer --lengths$"
    ):
        turns._sample(setting(), 2048, 0)


def test_similarity_is_bleu_over_words():
    assert similarity.similarity("a  b\nc d", " a b c d ") == pytest.approx(1)
    # 7 of 8 words, 6 of 7 pairs, 5 of 6 triples and 4 of 5 quadruples agree: their product is 1/2.
    assert similarity.similarity("a b c d e f g x", "a b c d e f g h") == pytest.approx(0.5**0.25)
    # All of the answer agrees, but it has 4 of 8 words.
    assert similarity.similarity("a b c d", "a b c d e f g h") == pytest.approx(math.exp(1 - 8 / 4))


@pytest.mark.parametrize(
    "code, left",
    [
        ("def f(x):\n    y = x  # one\n    # two\n    return '# three'", "def f(x):\n    y = x  \n    \n    return '# three'"),
        ('def f():\n    """Doc\n    string."""  # and\n    return 1', "def f():\n      \n    return 1"),
        ('if x:\n    "text"\n    "te" + "xt"\n"module"', 'if x:\n    \n    "te" + "xt"\n"module"'),
        ("def f(:\n    # one\n    return (1", "def f(:\n    \n    return (1"),  # as far as its tokens are Python's
        ("It's nothing. # 1", "It's nothing. # 1"),
    ],
)
def test_comments_and_docstrings_are_left_out(code, left):
    assert similarity.without_comments(code) == left


def test_an_answer_with_comments_is_the_function():
    target = library.Function("a.py", "f", "def f(x):\n    y = x + 1\n    return y * 2", None)
    answer = 'def f(x):\n    """Returns twice the next number."""\n    y = x + 1  # the next one\n    # twice\n    return y * 2'
    assert similarity.scores(f"```python\n{answer}\n```", target, [target]) == (1, pytest.approx(1))


@pytest.mark.parametrize(
    "answer, function",
    [
        ("def f():\n    return 1", "def f():\n    return 1"),
        ("Here:\n```python\nimport os\ndef f():\n    return 1\ndef g(): pass\n```\nDone.", "def f():\n    return 1"),
        ("```\nx = 1\n```\n```python\ndef f(): return 1\n```", "def f(): return 1"),
        ("```python\ndef f(:\n```", "def f(:\n"),
        ("```python\ndef f(): return 1", "```python\ndef f(): return 1"),  # a block without an end
    ],
)
def test_the_function_of_an_answer_is_the_first_in_its_blocks(answer, function):
    assert similarity.function_of(answer) == function


def test_the_nearest_function_is_found_if_it_is_near_enough():
    body = "\n".join(f"    x{i} = {i} + {i}" for i in range(8))
    target, twin = (library.Function("a.py", name, f"def {name}():\n{body}\n    return {name}_1", None) for name in ("f", "g"))
    near = target.source.replace("x3 = 3", "x3 = 4")
    for answer, found in (
        (target.source, 1),
        (f"It is\n```python\n{near}\n```", 1),
        (twin.source, 0),
        (target.source[:40], 0),  # the nearest, but too far
        ("", 0),
    ):
        assert similarity.scores(answer, target, [twin, target])[0] == found, answer
    assert similarity.scores(target.source, target, [twin, target])[1] == pytest.approx(1)


def test_perplexity_windows_are_the_files_tokens(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(" ".join(map(str, range(400))))  # 799 tokens
    task = perplexity.task(setting(text=file, lengths=(64, 256)))
    docs = list(task.test_docs())
    # 63 tokens behind <s> and 128 scored ones make a window of 191, of which four fit; two of 383.
    assert [(doc["length"], doc["first"]) for doc in docs] == [(64, 0), (256, 0), (64, 191), (256, 383), (64, 382), (64, 573)]
    tokens = words(file.read_text(), add_special_tokens=False)
    for doc in docs:
        window = task.window(doc)
        assert window[0] == "<s>" and window[1:] == tokens[doc["first"] : doc["first"] + doc["length"] + 127]
        assert len(window) == doc["length"] + perplexity.SCORED
    assert task.process_results(docs[0], [[-1.0, -3.0]]) == dict(nll=2)


@pytest.mark.parametrize(
    "text, lengths, message",
    [
        (None, None, "needs --text FILE"),
        ("", None, "is empty"),
        (b"\xff", None, r"is not UTF-8 \(byte 0\)"),
        ("a b c", None, "has 5 tokens and the context 8192"),
        ("a " * 500, (1024,), "--lengths must be at most 873"),
    ],
)
def test_a_text_that_cannot_be_scored_is_refused(tmp_path, text, lengths, message):
    file = tmp_path / "text.txt"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=message):
        perplexity.task(setting(text=None if text is None else file, lengths=lengths))
    with pytest.raises(InputError, match="cannot be read: No such file"):
        perplexity.task(setting(text=tmp_path / "nowhere"))


def test_the_harness_makes_a_task_of_ours_without_a_warning(caplog):
    task = niah.task(setting(lengths=(512, 1024)))
    assert [row["length"] for row in task.test_docs()] == [512] * 11 + [1024] * 11
    assert not caplog.records
