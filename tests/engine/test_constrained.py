"""Answers under grammars: only what the grammar allows, and else what the step draws without one."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import icejax
from icejax import Grammar, InputError, Request, Sampling
from icejax.engine.decode.constrained import constrained, unpacked
from icejax.engine.decode.counters import pack_nothing, with_tokens
from icejax.engine.decode.state import Step
from icejax.engine.penalties import RowPenalties
from icejax.engine.sampling import RowSampling
from tests import tolerances

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b c"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PENALISED = Sampling(temperature=1.5, repetition_penalty=1.2, frequency_penalty=1.0, presence_penalty=0.5, logit_bias={5: 3.0})
SHORT = dict(cache=icejax.Full(), context_length=300)


@pytest.fixture(scope="module")
def engine(bundled):
    with icejax.Engine(*bundled, cache=icejax.Full(), batch_size=3, context_length=300, max_new_tokens=150) as engine:
        yield engine


@pytest.mark.slow
def test_drawn_answers_follow_their_schema_beside_rows_without_one(engine):
    jsonschema = pytest.importorskip("jsonschema")
    free = dict(prompt="def f(", sampling=Sampling(temperature=1.5), seed=1, max_new_tokens=30)
    alone = engine.submit(Request(**free)).result().text
    request = Request(prompt="import os", grammar=Grammar.json_schema(SCHEMA), sampling=PENALISED, max_new_tokens=150)
    handles = [engine.submit(request, n=2, seed=3), engine.submit(Request(**free))]
    answers, beside = handles[0].results(), handles[1].result().text
    for answer in answers:
        jsonschema.validate(json.loads(answer.text), SCHEMA)
        assert answer.finish_reason == "stop"
    assert answers[0].text != answers[1].text and beside == alone


def test_a_grammar_that_allows_the_answer_changes_nothing(engine):
    """Tokens are drawn with the same keys, and penalties count the same tokens."""
    for sampling in (Sampling(), PENALISED):
        options = dict(prompt="def f(a):", sampling=sampling, seed=7, max_new_tokens=20)
        free = engine.submit(Request(**options)).result()
        bound = engine.submit(Request(grammar=Grammar.regex(r"(?s:.*)"), **options), logprobs=0).result()
        if "\N{REPLACEMENT CHARACTER}" not in free.text:  # the grammar writes UTF-8 alone
            assert bound.token_ids == free.token_ids


def test_a_greedy_answer_is_the_likeliest_that_is_allowed(bundled, engine):
    """Every byte is the model's likeliest among those with which one of the texts continues."""
    texts = ["zebra", "zoo", "quail"]
    answer = engine.submit(Request(prompt="import ", grammar=Grammar.choice(texts)), logprobs=0).result()
    assert answer.text in texts and answer.finish_reason == "stop"
    for at in range(len(answer.text)):
        allowed = sorted({text[at] for text in texts if text.startswith(answer.text[:at]) and len(text) > at})
        scored = icejax.generate(*bundled, "import " + answer.text[:at], max_new_tokens=1, logprobs=257, **SHORT)[0].logprobs[0]
        logprobs = {token.text: token.logprob for token in scored.top}
        assert answer.text[at] == max(allowed, key=logprobs.get)
        np.testing.assert_allclose(
            answer.logprobs[at].chosen.logprob, logprobs[answer.text[at]], rtol=0, atol=tolerances.LOGITS
        )


def test_stop_strings_and_limits_end_an_answer_within_its_grammar(engine):
    grammar = Grammar.regex("a{3}b{3}")
    assert engine.submit(Request(prompt="x", grammar=grammar, stop="bb")).result().text == "aaa"
    answer = engine.submit(Request(prompt="x", grammar=grammar, max_new_tokens=2)).result()
    assert (answer.text, answer.finish_reason) == ("aa", "length")
    open_end = engine.submit(
        Request(prompt="x", grammar=Grammar.regex("a+"), sampling=Sampling(logit_bias={256: 100}))
    ).result()
    assert (open_end.text, open_end.finish_reason, open_end.token_ids[-1]) == ("a", "stop", 256)


def test_a_choice_under_masks_is_that_of_numpy(bundled):
    """Penalties that have counted the first choice count the second one in its place."""
    from icejax.engine.batch import empty_batch
    from icejax.engine.plan import make_plan

    (model, _), batch = bundled, 2
    plan = make_plan(model, icejax.Full(), batch_size=batch, prompt_tokens=8, new_tokens=8, joins=True)
    rng, vocabulary = np.random.default_rng(0), model.config.vocab_size
    logits = rng.normal(size=(batch, vocabulary)).astype(np.float32)
    options = [Sampling(repetition_penalty=1.5, frequency_penalty=1.0)] * batch
    texts = [[1, 1, 2], [4]]
    first = np.asarray([1, 9], np.int32)
    penalties = RowPenalties.of(options, texts, vocabulary).after(jnp.asarray(first))
    state = jax.tree.map(jnp.copy, empty_batch(plan))
    state = type(state)(
        state.cache,
        jnp.asarray(first),
        jnp.asarray([True, False]),
        state.key,
        state.draw_origin,
        RowSampling.of(options),
        penalties,
    )
    allowed = rng.random((batch, vocabulary)) < 0.1
    bits = np.packbits(np.pad(allowed, ((0, 0), (0, -vocabulary % 32))), axis=1, bitorder="little").view(np.uint32)
    np.testing.assert_array_equal(unpacked(jnp.asarray(bits), vocabulary), allowed)
    rows = np.asarray([True, False])
    new, step = constrained(
        state, Step(with_tokens(jnp.asarray(pack_nothing(batch)), jnp.asarray(first)), jnp.asarray(logits)), bits, rows, plan
    )
    expected = np.where(
        np.isin(np.arange(vocabulary), texts[0]), np.where(logits[0] > 0, logits[0] / 1.5, logits[0] * 1.5), logits[0]
    )
    chosen = int(np.where(allowed[0], expected, -np.inf).argmax())
    assert step.tokens.tolist() == new.last_tokens.tolist() == [chosen, 9] and new.done.tolist() == [False, False]
    counts, seen = np.zeros((2, batch, vocabulary), np.int32)
    counts[[0, 1], [chosen, 9]] = 1
    for row, text in enumerate(texts):
        np.add.at(seen[row], text, 1)
    np.testing.assert_array_equal(new.penalties.counts, counts)
    np.testing.assert_array_equal(new.penalties.seen, seen + counts)


@pytest.mark.parametrize(
    "grammar, message",
    [
        (Grammar.json_schema({"type": "foo"}), "the grammar cannot be followed: .*Invalid type: foo"),
        (Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar.json_schema({"$ref": "#"}), "the grammar cannot be followed"),
        (Grammar.json_schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (Grammar.json_schema({"enum": ["x" * 300_000]}), r"a grammar has 300\d+ characters, of at most 262144: shorten its schemas"),
        (Grammar.regex("a\\"), "the grammar cannot be followed"),
        ("x", "grammar must be an icejax.Grammar, got 'x'"),
    ],
)  # fmt: skip
def test_grammars_that_cannot_be_followed_are_refused_with_one_line(engine, grammar, message):
    with pytest.raises(InputError, match=message) as error:
        engine.submit(Request(prompt="x", grammar=grammar))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_forced_tokens_and_a_grammar_do_not_go_together():
    with pytest.raises(InputError, match="a request has forced_tokens and a grammar: give one of them"):
        Request(prompt="x", grammar=Grammar.json_object(), forced_tokens=[1])
