"""Answers that the caller names: their log-probabilities are those of transformers, and other rows answer as they do alone."""

import numpy as np
import pytest

import icejax
from icejax.api.generate import ASSETS
from icejax.cache.registry import Full
from icejax.checks.errors import InputError
from icejax.engine.decode.counters import NOT_FINITE
from icejax.engine.decode.run import _forced
from tests import tolerances

TEXT = list(b"def add(a, b):\n    return ")
ANSWERS = [list(b"a + b\n"), list(b"import os"), [97, 256, 98]]  # the last has an end in the middle


@pytest.fixture(scope="module")
def expected():
    """Log-probabilities of the answers behind the text, by transformers."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(ASSETS, dtype=torch.float32)
    values = []
    for answer in ANSWERS:
        with torch.no_grad():
            logits = model(torch.tensor([TEXT + answer])).logits[0].log_softmax(-1)
        values.append([float(logits[len(TEXT) - 1 + i, token]) for i, token in enumerate(answer)])
    return values


@pytest.mark.parametrize(
    "cache", [Full(), pytest.param(icejax.Clustered(budget=96), marks=pytest.mark.slow)], ids=["full", "clustered"]
)
def test_log_probabilities_of_a_named_answer_equal_transformers(bundled, expected, cache):
    forced = [icejax.Request(prompt=TEXT, forced_tokens=answer, logprobs=1) for answer in ANSWERS]
    free = icejax.Request(prompt="import ", max_new_tokens=12)
    *responses, other = icejax.generate(*bundled, [*forced, free], cache=cache, batch_size=2)
    for answer, response, values in zip(ANSWERS, responses, expected, strict=True):
        assert response.token_ids == tuple(answer) and response.finish_reason == "length"
        np.testing.assert_allclose([x.chosen.logprob for x in response.logprobs], values, rtol=0, atol=tolerances.LOGITS)
    assert other.token_ids == icejax.generate(*bundled, free, cache=cache)[0].token_ids


def test_a_named_answer_needs_room_and_known_tokens(bundled):
    def refusal(tokens: list[int], **options) -> str:
        with pytest.raises(InputError) as refused:
            icejax.generate(*bundled, icejax.Request(prompt=TEXT, forced_tokens=tokens), **options)
        return str(refused.value)

    assert "expected at most 30 in all" in refusal([1] * 9, context_length=30)
    assert "the model knows" in refusal([10**6])
    assert "at least one token id" in refusal([])
    assert "a token of forced_tokens" in refusal([-1])


def test_a_named_token_undoes_an_end_and_hides_no_failure():
    counters = np.zeros((8, 3), np.int32)
    counters[0] = [5, NOT_FINITE, 9]
    counters, done = _forced(counters, np.full(3, True), np.asarray([True, True, False]), np.asarray([7, 7, 7], np.int32))
    assert (counters[0].tolist(), done.tolist()) == ([7, NOT_FINITE, 9], [False, True, True])
