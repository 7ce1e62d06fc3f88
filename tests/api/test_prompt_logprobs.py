"""Log-probabilities of a prompt's own tokens, against the logits of a whole pass over it."""

import numpy as np
import pytest
from scipy.special import log_softmax

import icejax
from icejax.cache.registry import Clustered, Full
from icejax.engine.decode.logprobs import compiled_count
from tests import tolerances
from tests.helpers.run import all_logits

TOKENS = [32 + i * 7 % 200 for i in range(260)]  # three blocks of the head, the last of three tokens
ASKED = icejax.Request(prompt=TOKENS, prompt_logprobs=2, max_new_tokens=2)


@pytest.fixture(scope="module")
def expected(bundled) -> np.ndarray:
    return log_softmax(all_logits(bundled[0], TOKENS, Full()).astype(np.float64), axis=-1)


def check(entries, expected: np.ndarray) -> None:
    """Asserts that each token but the first has its log-probability behind the others, beside the two best there."""
    assert [entry.chosen.token_id for entry in entries] == TOKENS[1:]
    for entry, token, row in zip(entries, TOKENS[1:], expected[:-1], strict=True):
        best = np.argsort(-row)[:2]
        np.testing.assert_allclose(entry.chosen.logprob, row[token], rtol=0, atol=tolerances.LOGITS)
        np.testing.assert_allclose([t.logprob for t in entry.top], row[best], rtol=0, atol=tolerances.LOGITS)
        assert entry.top[0].token_id == best[0] or row[best[0]] - row[best[1]] < tolerances.LOGITS


@pytest.mark.parametrize(
    "cache", [Full(), pytest.param(Clustered(budget=64), marks=pytest.mark.slow)], ids=["full", "clustered"]
)
def test_they_are_those_of_exact_attention(bundled, expected, cache):
    [response] = icejax.generate(*bundled, ASKED, cache=cache)
    check(response.prompt_logprobs, expected)
    assert response.new_tokens == 2 and response.logprobs is None


@pytest.mark.slow
def test_a_stored_prefix_is_not_used_and_nothing_is_stored(bundled, expected):
    with icejax.Engine(*bundled, cache=Full(), batch_size=2, context_length=512, max_new_tokens=8) as engine:
        for _ in range(2):
            assert engine.submit(TOKENS, max_new_tokens=1).result().prompt_logprobs is None
        answers = [engine.submit(ASKED).result() for _ in range(2)]
        assert engine.submit(TOKENS, max_new_tokens=1).result().cached_tokens == len(TOKENS)
    for answer in answers:
        check(answer.prompt_logprobs, expected)
        assert answer.cached_tokens == 0


def test_a_number_out_of_range_is_refused():
    with pytest.raises(icejax.InputError, match="prompt_logprobs must be at most 1000, got 1001"):
        icejax.Request(prompt="a", prompt_logprobs=1001)


def test_one_program_serves_all_numbers_that_clients_ask_for():
    assert [compiled_count(most, 1000) for most in (0, 1, 17, 20, 21, 33)] == [20, 20, 20, 20, 32, 64]
    assert compiled_count(5, 10) == 10
