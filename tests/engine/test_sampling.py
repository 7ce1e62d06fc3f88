"""Sampling: the candidates are those of transformers' logits processors, and draws follow their probabilities."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import icejax
from icejax.checks.errors import InputError
from icejax.engine.decode import choice
from icejax.engine.decode import step as decode_step
from icejax.engine.penalties import RowPenalties
from icejax.engine.sampling import RowSampling, Sampling, candidates, choose, kth_largest, row_keys
from icejax.ops.threshold import ordered
from tests.helpers.run import jitted

VOCABULARY = 50
CASES = {
    "temperature": Sampling(temperature=0.7),
    "top_k": Sampling(temperature=1.0, top_k=5),
    "top_p": Sampling(temperature=1.3, top_p=0.6),
    "min_p": Sampling(temperature=1.0, min_p=0.1),
    "all": Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.7),
}


# The rows of one batch, each with its own options.
ROWS = (
    *CASES.values(),
    Sampling(),
    Sampling(repetition_penalty=0.6),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=0.3, top_k=VOCABULARY + 5, top_p=0.99),
    Sampling(temperature=2.0, top_k=30, top_p=0.3),
    Sampling(temperature=1e-3, top_p=0.5, min_p=0.5),
    Sampling(temperature=1.0, top_p=1e-300),
    Sampling(temperature=1.0, top_p=0.9999, min_p=1e-30),
    Sampling(temperature=5.0, min_p=1.0),
    Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.3),
)


def scores(sampling: Sampling, text: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Returns the logits that transformers would draw from, -inf for tokens that are cut."""
    import torch
    from transformers.generation import logits_process as steps

    chain = steps.LogitsProcessorList([steps.TemperatureLogitsWarper(sampling.temperature)])
    if sampling.repetition_penalty != 1:
        chain.insert(0, steps.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.top_k:
        chain.append(steps.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(steps.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(steps.MinPLogitsWarper(sampling.min_p))
    return chain(torch.tensor(text), torch.tensor(logits)).numpy()


NOT_SLOW = ("temperature", "top_p", "all")


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in NOT_SLOW else pytest.mark.slow) for x in CASES])
def test_draws_follow_transformers_probabilities(name):
    import torch

    rng = np.random.default_rng(0)
    logits = rng.standard_normal((1, VOCABULARY)).astype(np.float32) * 2
    text = rng.integers(0, VOCABULARY, (1, 10))
    expected = torch.softmax(torch.tensor(scores(CASES[name], text, logits)), -1).numpy()[0]
    draws = 20000
    changed = RowPenalties.of([CASES[name]], text.tolist(), VOCABULARY).apply(jnp.asarray(logits))
    samples = jitted(
        choose,
        jnp.broadcast_to(changed, (draws, VOCABULARY)),
        RowSampling.of([CASES[name]] * draws),
        keys=jax.random.split(jax.random.key(1), draws),
    )
    frequencies = np.bincount(np.asarray(samples), minlength=VOCABULARY) / draws
    assert (frequencies[expected == 0] == 0).all()
    np.testing.assert_allclose(frequencies, expected, atol=5 * np.sqrt(0.25 / draws))


@pytest.mark.parametrize("scale", [1.0, 12.0])
@pytest.mark.parametrize("grain", [0, 0.5], ids=["apart", "ties"])
def test_rows_of_one_batch_keep_what_transformers_keeps(scale, grain):
    """Of equal logits at the border of top-p, transformers keeps those that its sort puts first; icejax keeps all."""

    @jax.jit
    def ours_of(logits, penalties, rows):
        logits = penalties.apply(logits)
        return candidates(logits, rows), logits

    for seed in range(20):
        rng = np.random.default_rng(seed)
        logits = (rng.standard_normal((len(ROWS), VOCABULARY)) * scale).astype(np.float32)
        if grain:
            logits = np.round(logits / (grain * scale)) * np.float32(grain * scale)
        rows = [ROWS[i] for i in rng.permutation(len(ROWS))]
        texts = rng.integers(0, VOCABULARY, (len(ROWS), 10))
        results = ours_of(jnp.asarray(logits), RowPenalties.of(rows, texts.tolist(), VOCABULARY), RowSampling.of(rows))
        for row, text, row_logits, ours, penalised_logits in zip(rows, texts, logits, *map(np.asarray, results), strict=True):
            if not row.samples:
                assert np.isfinite(ours).all()
                continue
            expected = scores(row, text[None], row_logits[None])[0]
            is_candidate, scaled = (
                np.isfinite(expected),
                (penalised_logits.astype(np.float64) - penalised_logits.max()) / row.temperature,
            )
            np.testing.assert_array_equal(
                np.isfinite(ours), penalised_logits >= penalised_logits[is_candidate].min() if grain else is_candidate
            )
            np.testing.assert_allclose(ours[np.isfinite(ours)], scaled[np.isfinite(ours)], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(ours[is_candidate], expected[is_candidate] - expected.max(), rtol=1e-4, atol=1e-4)


def test_equal_logits_at_the_kth_place_stay():
    logits = jnp.asarray([[3.0, 0.0, 1.0, -0.0, 1.0], [-2.0, -1.0, -2.0, -3.0, -2.0]])
    actual = jitted(
        candidates, logits, RowSampling.of([Sampling(temperature=1.0, top_k=4), Sampling(temperature=2.0, top_k=2)])
    )
    np.testing.assert_array_equal(np.isfinite(actual), [[1, 1, 1, 1, 1], [1, 1, 1, 0, 1]])


@pytest.mark.slow
@settings(deadline=None)  # the first example compiles
@given(
    st.lists(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=4, max_size=4), min_size=3, max_size=3
    ),
    st.lists(st.integers(0, 6), min_size=3, max_size=3),
)
def test_the_kth_largest_is_that_of_a_sort(rows, k):
    values = np.asarray(rows, np.float32)
    values[np.abs(values) < np.finfo(np.float32).tiny] = 0  # XLA:CPU treats subnormal numbers as zero
    order = ordered(jnp.asarray(values))
    actual = kth_largest(order, jnp.asarray(k, jnp.int32))
    expected = [np.sort(row)[::-1][min(count or 4, 4) - 1] for row, count in zip(values, k, strict=True)]
    np.testing.assert_array_equal(actual, ordered(jnp.asarray(expected)))
    np.testing.assert_array_equal(np.asarray(order)[:, :-1] < np.asarray(order)[:, 1:], values[:, :-1] < values[:, 1:])


def test_greedy_with_penalty_equals_transformers():
    import torch
    from transformers import RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(1)
    logits = rng.standard_normal((4, VOCABULARY)).astype(np.float32)
    text = np.argsort(-logits)[:, :3]
    rows = [Sampling(repetition_penalty=penalty) for penalty in (3.0, 1.0, 0.5, 1e6)]
    examples = zip(rows, text, logits, strict=True)
    expected = [
        RepetitionPenaltyLogitsProcessor(r.repetition_penalty)(*map(torch.tensor, (t[None], x[None]))) for r, t, x in examples
    ]
    changed = RowPenalties.of(rows, text.tolist(), VOCABULARY).apply(jnp.asarray(logits))
    for row_sampling in (None, RowSampling.of(rows)):
        actual = jitted(choose, changed, row_sampling, keys=jax.random.split(jax.random.key(0), 4))
        np.testing.assert_array_equal(actual, [int(scores.argmax()) for scores in expected])


@pytest.mark.slow
def test_equal_keys_draw_equally_and_others_do_not():
    logits, rows = jnp.zeros((3, 1000)), RowSampling.of([Sampling(temperature=1.0)] * 3)
    keys = [row_keys([(seed, i) for i in range(3)]) for seed in (5, 5, 6)]
    draws = [np.asarray(choose(logits, rows, keys=batch_keys)) for batch_keys in keys]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).all() and len(set(draws[0].tolist())) == 3


def test_the_vocabulary_is_not_sorted_and_nothing_loops():
    """A sort takes long on an accelerator; a loop would end the CUDA graph of a step."""
    lowered = jax.jit(candidates).lower(jnp.zeros((2, 5000)), RowSampling.of([ROWS[0]] * 2))
    assert not re.search(r"sort|top_k|while|case", lowered.as_text())


@pytest.mark.slow
def test_another_temperature_compiles_nothing(bundled, monkeypatch):
    """All batches have one step; one choice of tokens serves greedy batches, and one those in which a row samples."""
    decode_step.step_program.cache_clear()
    choice._chosen.clear_cache()
    used_programs, programs = [], decode_step.step_program
    monkeypatch.setattr(
        decode_step, "step_program", lambda *arguments: used_programs.append(programs(*arguments)) or used_programs[-1]
    )

    def num_compiled(*rows: Sampling) -> tuple[int, int]:
        requests = [icejax.Request(prompt="import ", sampling=row) for row in rows]
        icejax.generate(*bundled, requests, cache=icejax.Full(), max_new_tokens=3)
        return used_programs[-1]._cache_size(), choice._chosen._cache_size()

    assert num_compiled(Sampling(), Sampling()) == (1, 2)  # of a prompt and of both rows
    assert num_compiled(Sampling(temperature=0.7), Sampling()) == (1, 4)
    for row in (
        Sampling(temperature=0.9, top_k=5),
        Sampling(temperature=1e-6, top_p=0.1),
        Sampling(temperature=2.0, min_p=0.2),
    ):
        assert num_compiled(Sampling(temperature=1.1), row) == num_compiled(row, row) == (1, 4)
    assert num_compiled(Sampling(), Sampling()) == (1, 4)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -1.0}, "temperature must be a number from 0 to 1e+06, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be a number from 0 to 1e+06, got nan"),
        ({"temperature": float("inf")}, "temperature must be a number from 0 to 1e+06, got inf"),
        ({"temperature": 1e-300}, "temperature above 0 must be a number from 1e-06 to 1e+06, got 1e-300"),
        ({"temperature": True}, "temperature must be a number from 0 to 1e+06, got True"),
        ({"temperature": "1"}, "temperature must be a number from 0 to 1e+06, got '1'"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_k": 1.5}, "top_k must be a whole number, got 1.5"),
        ({"top_k": 2**40}, "top_k must be at most 2147483647, got 1099511627776"),
        ({"top_k": 10**5000}, "top_k must be at most 2147483647, got a number of thousands of digits"),
        ({"top_p": 0.0}, "top_p must be a number above 0 and at most 1, got 0.0"),
        ({"min_p": 2.0}, "min_p must be a number from 0 to 1, got 2.0"),
        ({"min_p": float("nan")}, "min_p must be a number from 0 to 1, got nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a number from 1e-06 to 1e+06, got 0.0"),
        ({"presence_penalty": 2.1}, "presence_penalty must be a number from -2 to 2, got 2.1"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be a number from -2 to 2, got nan"),
        ({"logit_bias": [5, 1]}, "logit_bias must have a number for each of some token ids, got [5, 1]"),
        ({"logit_bias": {5: 101}}, "logit_bias of token 5 must be a number from -100 to 100, got 101"),
        ({"logit_bias": {5: None}}, "logit_bias of token 5 must be a number from -100 to 100, got None"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias of token 5 must be a number from -100 to 100, got nan"),
        ({"logit_bias": {"a": 1}}, "a token id of logit_bias must be a whole number, got 'a'"),
        ({"logit_bias": {True: 1}}, "a token id of logit_bias must be a whole number, got True"),
        ({"logit_bias": {-1: 1}}, "a token id of logit_bias must be at least 0, got -1"),
        ({"logit_bias": {"9" * 19: 1}}, f"a token id of logit_bias must be at most 2147483647, got {'9' * 19}"),
        ({"logit_bias": {5: 1, "05": 2}}, "logit_bias has token 5 twice: give one number for it"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias must have at most 1024 token ids, got 1025"),
    ],
)
def test_out_of_range_options_are_refused(options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        Sampling(**options)
