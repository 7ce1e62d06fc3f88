"""Penalties and logit bias: formulas of OpenAI and vLLM in numpy, transformers' processors, counts of the present answer alone."""

import jax.numpy as jnp
import numpy as np
import pytest

import icejax
from icejax.cache.registry import Full
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.extend import extend
from icejax.engine.penalties import RowPenalties, neutral_where_none, row_options
from icejax.engine.plan import make_plan
from icejax.engine.prefill import prefill
from icejax.engine.sampling import Sampling
from icejax.session.session import Session
from tests.helpers import families
from tests.helpers.letters import Letters
from tests.helpers.run import all_logits

VOCABULARY = 50
ROWS = (
    Sampling(),
    Sampling(presence_penalty=1.5),
    Sampling(frequency_penalty=-2.0, presence_penalty=0.25),
    Sampling(repetition_penalty=1.7, frequency_penalty=0.5),
    Sampling(logit_bias={3: 100, "7": -100.0, 11: 0.5}),
    Sampling(repetition_penalty=0.6, presence_penalty=-1.0, frequency_penalty=2.0, logit_bias={0: -5, 49: 5}),
)


def changed(logits: np.ndarray, sampling: Sampling, prompt, answer) -> np.ndarray:
    """Returns logits f32[V] after bias and repetition penalty of transformers, then OpenAI's formula in float64.

    It is mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence; c[j] counts the answer's tokens (vLLM).
    """
    import torch
    from transformers.generation import logits_process as steps

    chain, text = steps.LogitsProcessorList(), [*prompt, *answer]
    if sampling.logit_bias:
        chain.append(steps.SequenceBiasLogitsProcessor({(token,): float(b) for token, b in sampling.logit_bias.items()}))
    if sampling.repetition_penalty != 1:
        chain.append(steps.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    scores = chain(torch.tensor([text]), torch.tensor(logits[None])).numpy()[0].astype(np.float64)
    counts = np.bincount(np.asarray(answer, int), minlength=len(logits))
    return scores - counts * sampling.frequency_penalty - (counts > 0) * sampling.presence_penalty


def test_logits_equal_transformers_and_the_formulas():
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, VOCABULARY, (len(ROWS), 8))
    answers = rng.integers(0, 9, (len(ROWS), 12))  # tokens come again and again
    penalties = RowPenalties.of(ROWS, prompts.tolist(), VOCABULARY)
    for step in range(12):
        logits = rng.standard_normal((len(ROWS), VOCABULARY)).astype(np.float32) * 3
        actual = np.asarray(penalties.apply(jnp.asarray(logits)))
        expected = [changed(*row) for row in zip(logits, ROWS, prompts, answers[:, :step], strict=True)]
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(actual[0], logits[0])
        penalties = penalties.after(jnp.asarray(answers[:, step]))


def greedy_answer(model, sampling: Sampling, texts, answer) -> list[int]:
    """Returns the tokens that are the best by `changed` behind the texts and each part of the answer."""
    logits = all_logits(model, [*texts, *answer], Full())[len(texts) - 1 : -1]
    return [int(changed(x, sampling, texts, answer[:i]).argmax()) for i, x in enumerate(logits)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return families.load(families.build(families.row("llama-gqa")), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("sampling", [pytest.param(ROWS[2], marks=pytest.mark.slow), ROWS[3]], ids=["negative", "repetition"])
def test_an_answer_is_penalised_for_its_tokens_alone(model, sampling):
    """The prompt holds each letter four times; in a session each answer is counted again."""
    session = Session(model, Letters(), cache=Full(), context_length=400)
    for text in ("".join(map(chr, range(97, 123))) * 4, "abc"):
        response = session.ask(text, sampling=sampling, max_new_tokens=20)
        texts = session.token_ids[: -len(response.token_ids)]
        assert list(response.token_ids) == greedy_answer(model, sampling, texts, response.token_ids)
        assert list(response.token_ids) != greedy_answer(model, Sampling(), texts, response.token_ids)


def test_a_further_text_begins_the_counts_anew(model):
    """The penalties of the row stay, as in a batch whose row is extended; its next answer holds no token yet."""
    prompt, text, sampling = families.tokens(20), families.tokens(5, seed=1), ROWS[5]
    plan = make_plan(model, Full(), batch_size=1, prompt_tokens=60, new_tokens=20)
    state, step, pool = prefill(model, [prompt], plan, sampling=[sampling])
    programs, answer = DecodePrograms(model, plan), [int(step.tokens[0])]
    for _ in range(6):
        state, step, pool = programs.step(state, pool)
        answer.append(int(step.tokens[0]))
    state, step, pool = extend(model, text, plan, state, pool)
    held = [*prompt, *answer[:-1], *text]
    logits = all_logits(model, held, Full())[-1]
    # The answer's last token is not in the cache, but the repetition penalty knows that it was chosen.
    expected = changed(logits, sampling, [*prompt, *answer, *text], [])
    assert int(step.tokens[0]) == expected.argmax()
    np.testing.assert_array_equal(np.asarray(state.penalties.counts).sum(), 1)


def test_a_bias_bans_and_forces_tokens(model):
    """A bias of 100 is larger than any difference of logits."""
    prompts = [icejax.Request(prompt=[1, 2, 3], sampling=Sampling(logit_bias=bias)) for bias in ({7: 100}, {7: -100}, None)]
    forced, banned, plain = icejax.generate(model, Letters(), prompts, cache=Full(), max_new_tokens=8)
    assert set(forced.token_ids) == {7} and 7 not in banned.token_ids
    assert plain.token_ids == icejax.generate(model, Letters(), [1, 2, 3], cache=Full(), max_new_tokens=8)[0].token_ids


def test_greedy_rows_without_penalties_have_no_arrays_for_them(model):
    states = []
    watch = lambda state: states.append((state.sampling, state.penalties))  # noqa: E731
    icejax.generate(model, Letters(), [[1, 2], [3]], cache=Full(), max_new_tokens=3, watch=watch)
    assert states and all(state == (None, None) for state in states)
    assert row_options([Sampling(top_k=3)], [[1]], 50) == (None, None)


def test_batches_without_penalties_get_neutral_ones_beside_others():
    row = RowPenalties.of([ROWS[1]], [[1, 2]], VOCABULARY)
    neutral, same = neutral_where_none([None, row], [2, 1])
    assert same is row and neutral_where_none([None, None], [1, 2]) == [None, None]
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, VOCABULARY)).astype(np.float32))
    np.testing.assert_array_equal(neutral.after(jnp.asarray([1, 1])).apply(logits), logits)


def test_a_bias_beyond_the_vocabulary_is_refused(model):
    sampling, message = (
        Sampling(logit_bias={101: 1}),
        "logit_bias has token 101 and the model knows 101: give token ids of this",
    )
    with pytest.raises(icejax.InputError, match=f"^prompt 1: {message}"):
        icejax.generate(model, Letters(), [1], sampling=sampling)
    with pytest.raises(icejax.InputError, match=f"^prompt 2: {message}"):
        icejax.generate(model, Letters(), [icejax.Request(prompt=[1]), icejax.Request(prompt=[1], sampling=sampling)])
    session = Session(model, Letters(), cache=Full(), context_length=100)
    for _ in range(2):
        with pytest.raises(icejax.InputError, match=f"^{message}"):
            session.ask("a", sampling=sampling)
        session.ask("b", max_new_tokens=1)
