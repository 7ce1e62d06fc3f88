"""Sampling: what is kept equals transformers' processors, and draws follow the probabilities."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from icejax.errors import InputError
from icejax.sampling import Sampling, row_keys

VOCABULARY = 50
CASES = {
    "temperature": Sampling(temperature=0.7),
    "top_k": Sampling(temperature=1.0, top_k=5),
    "top_p": Sampling(temperature=1.3, top_p=0.6),
    "min_p": Sampling(temperature=1.0, min_p=0.1),
    "all": Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.7),
}


def theirs(sampling: Sampling, text: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Returns the probabilities transformers would draw from."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.repetition_penalty != 1:
        steps.insert(0, RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(MinPLogitsWarper(sampling.min_p))
    return torch.softmax(steps(torch.tensor(text), torch.tensor(logits)), -1).numpy()


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_transformers_probabilities(name):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((1, VOCABULARY)).astype(np.float32) * 2
    text = rng.integers(0, VOCABULARY, (1, 10))
    seen = np.zeros((1, VOCABULARY), bool)
    seen[0, text[0]] = True
    expected = theirs(CASES[name], text, logits)[0]
    draws = 20000
    many = jax.jit(CASES[name].choose)(
        jnp.broadcast_to(jnp.asarray(logits), (draws, VOCABULARY)),
        keys=jax.random.split(jax.random.key(1), draws),
        seen=jnp.broadcast_to(jnp.asarray(seen), (draws, VOCABULARY)),
    )
    found = np.bincount(np.asarray(many), minlength=VOCABULARY) / draws
    assert (found[expected == 0] == 0).all()
    np.testing.assert_allclose(found, expected, atol=5 * np.sqrt(0.25 / draws))


def test_greedy_with_penalty_equals_transformers():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((4, VOCABULARY)).astype(np.float32)
    text = np.argsort(-logits)[:, :3]
    seen = np.zeros(logits.shape, bool)
    np.put_along_axis(seen, text, True, axis=-1)
    expected = RepetitionPenaltyLogitsProcessor(3.0)(torch.tensor(text), torch.tensor(logits)).argmax(-1).numpy()
    found = Sampling(repetition_penalty=3.0).choose(
        jnp.asarray(logits), keys=jax.random.split(jax.random.key(0), 4), seen=jnp.asarray(seen)
    )
    np.testing.assert_array_equal(found, expected)


def test_equal_keys_draw_equally_and_others_do_not():
    logits = jnp.zeros((3, 1000))
    keys = [row_keys([(seed, i) for i in range(3)]) for seed in (5, 5, 6)]
    draw = [np.asarray(Sampling(temperature=1.0).choose(logits, keys=each, seen=None)) for each in keys]
    np.testing.assert_array_equal(draw[0], draw[1])
    assert (draw[0] != draw[2]).all() and len(set(draw[0].tolist())) == 3


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
    ],
)
def test_out_of_range_options_are_refused(options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        Sampling(**options)
