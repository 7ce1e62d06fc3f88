"""Options that Python callers pass: wrong types and sizes give a one-line error, and large values cost nothing."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import icejax
from icejax.api import prompts
from icejax.cache.registry import Clustered, Full
from icejax.text.detokenize import Detokenizer

WRONG = {
    "budget a float": (dict(budget=64.5), "budget must be a whole number, got 64.5"),
    "budget a text": (dict(budget="64"), "budget must be a whole number, got '64'"),
    "no budget": (dict(budget=None), "budget must be a whole number, got None"),
    "huge budget": (dict(budget=3_000_000_000), "budget must be at most 1073741824, got 3000000000"),
    "endless budget": (dict(budget=10**5000), "budget must be at most 1073741824, got a number of thousands of digits"),
    "page a truth": (dict(page_size=True), "page_size must be a whole number, got True"),
    "huge page": (dict(page_size=2**40), "page_size must be at most 128, got 1099511627776"),
    "window": (dict(window=1.0), "window must be a whole number, got 1.0"),
    "huge window": (dict(window=2**31), "window must be at most 1048576, got 2147483648"),
    "sinks": (dict(sinks=[4]), "sinks must be a whole number, got [4]"),
    "candidates": (dict(candidates=2**40), "candidates must be at most 1048576, got 1099511627776"),
    "opened": (dict(opened=0), "opened must be at least 1, got 0"),
    "reuse": (dict(reuse=10**6), "reuse must be at most 1024, got 1000000"),
    "dense layers": (dict(dense_layers=-1), "dense_layers must be at least 0, got -1"),
    "tail": (dict(tail=1), "tail must be true or false, got 1"),
    "resident": (dict(resident="no"), "resident must be true or false, got 'no'"),
    "score": (dict(score=["mean"]), "score must be one of second-order, mean, got ['mean']"),
}


@pytest.mark.parametrize("case", WRONG)
def test_options_of_the_cache(case):
    options, message = WRONG[case]
    with pytest.raises(icejax.InputError) as error:
        Clustered(**options)
    assert str(error.value) == message


@given(
    sinks=st.none() | st.integers(0, 300),
    window=st.none() | st.integers(1, 600),
    page=st.sampled_from([4, 8, 16, 32, 64, 128]),
    budget=st.integers(1, 1200),
)
def test_a_budget_is_taken_if_it_holds_what_it_must(sinks, window, page, budget):
    valid = window is None or window > page
    first = min(32, budget // 8) if sinks is None else sinks
    last = min(2 * page, budget // 8 + page) if window is None else window
    valid = valid and first + last + page <= budget and budget >= 8
    try:
        assert Clustered(sinks=sinks, window=window, page_size=page, budget=budget, compact_every=0) and valid
    except icejax.InputError:
        assert not valid


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(max_new_tokens=1.5), "max_new_tokens must be a whole number, got 1.5"),
        (dict(max_new_tokens=True), "max_new_tokens must be a whole number, got True"),
        (dict(seed=0.0), "seed must be a whole number, got 0.0"),
        (dict(seed=2**32), "seed must be at most 4294967295, got 4294967296"),
        (dict(context_length=10**12), "context_length must be at most 16777216, got 1000000000000"),
        (dict(context_length=20.0), "context_length must be a whole number, got 20.0"),
        (dict(stop=["a", 3]), "a stop string must be text, got 3"),
        (dict(stop=["a", ""]), "a stop string is empty: expected some text"),
        (dict(stop=""), "a stop string is empty: expected some text"),
    ],
)
def test_options_of_an_answer(bundled, options, message):
    with pytest.raises(icejax.InputError) as error:
        icejax.generate(*bundled, "x", **options)
    assert str(error.value) == message


def test_stop_string_alone_and_endless_new_tokens_are_valid(bundled):
    """A `stop` string read as a list of letters would end the answer at its first letter."""
    options = dict(cache=Full(), context_length=40)
    (answer,) = icejax.generate(*bundled, "import os\nimport sys\n", max_new_tokens=10**12, **options)
    text, session = answer.text, icejax.Session(*bundled, **options)
    assert len(text) > 8 and text[7] not in text[:4]
    stop = text[6] + text[7]
    expected = text[: text.index(stop)]
    assert icejax.generate(*bundled, "import os\nimport sys\n", stop=stop, **options)[0].text == expected
    assert session.ask("import os\nimport sys\n", stop=stop).text == expected


def test_a_text_far_too_long_is_told_at_once(bundled):
    model, tokenizer = bundled
    counted = []

    def count(text, **options):
        counted.append(len(text))
        return tokenizer(text, **options)

    class Counting:
        __call__ = staticmethod(count)
        bos_token = None

    session = icejax.Session(model, Counting(), context_length=100)
    for run in (lambda text: icejax.generate(model, Counting(), text, context_length=100), session.ask):
        with pytest.raises(icejax.InputError, match="has at least 400 tokens and the context holds 100"):
            run("x" * 10**7)
        with pytest.raises(icejax.InputError, match="has 350 tokens and the context holds 100"):
            run("x" * 350)
    assert max(counted) == 400


def test_a_text_of_long_tokens_is_read_on():
    """If tokens hold many characters, a prefix of the text does not show how many tokens it has."""

    def words(text, **_):
        return {"input_ids": [len(word) for word in text.split()]}

    text = " ".join(["x" * 99] * 30)
    assert prompts._tokens(words, text, special_tokens=True, enough=50) == ([99] * 30, False)
    assert prompts._tokens(words, text, special_tokens=True, enough=20) == ([99] * 25 + [60], True)
    assert prompts._tokens(words, "", special_tokens=True, enough=20) == ([], False)


def test_slow_tokenizer_is_found_by_a_few_characters(monkeypatch):
    """The clock shows a second per character."""
    now = [0]

    def slow(text, **_):
        now[0] += len(text)
        return {"input_ids": [*text.encode()]}

    monkeypatch.setattr(prompts, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    with pytest.raises(
        icejax.InputError, match=r"^the tokenizer took 16\.0 s for 16 characters, expected thousandths: look at "
    ):
        prompts._tokens(slow, "x" * 10**6, special_tokens=True, enough=10**6)
    assert now == [16]


class Letters:
    """A tokenizer with a token per letter."""

    def decode(self, tokens, **_):
        return "".join(map(chr, tokens))


def naive_release(held: str, text: str, stop: list[str]) -> tuple[str, str, bool]:
    """The rule, written plainly: returns the released text, the held text, and whether a stop string has come."""
    text = held + text
    starts = [text.index(s) for s in stop if s in text]
    if starts:
        return text[: min(starts)], "", True
    num_held = max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
    return text[: len(text) - num_held], text[len(text) - num_held :], False


@given(text=st.text("ab", max_size=40), stop=st.lists(st.text("abc", min_size=1, max_size=8), max_size=5))
def test_what_is_held_back_is_as_the_rule_says(text, stop):
    stream, held = Detokenizer(Letters(), stop), ""
    for letter in text:
        expected, held, stopped = naive_release(held, letter, stop)
        assert stream.add(ord(letter)) == expected and stream.stopped == stopped
        if stopped:
            return
    assert stream.rest() == held


@pytest.mark.parametrize("stop", [["a" * 10**6], ["a" * n for n in range(1000, 4000)]], ids=["long", "many"])
def test_long_and_many_stop_strings_cost_little(stop):
    """With `naive_release` this would take minutes."""
    stream = Detokenizer(Letters(), stop)
    out = "".join(stream.add(ord(letter)) for letter in "a" * 300 + "b" + "a" * 300)
    assert out == "a" * 300 + "b" and stream.rest() == "a" * 300
