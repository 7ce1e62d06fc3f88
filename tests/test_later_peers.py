"""Later methods of other papers against plain numpy: which tokens are chosen, and what comes of it."""

import functools

import jax
import numpy as np
import pytest

import icejax
from icejax.cache import RocketKV
from icejax.ops.attention import Scoring
from tests import reference_later as reference
from tests.layer import KV_HEADS, Layer, draw
from tests.test_peers import LENGTHS, STEPS, compare, kept, row_of

slow = pytest.mark.slow


@pytest.mark.parametrize(
    "budget, kept_of, page, channels",
    [
        pytest.param(16, 150, 3, 10, marks=slow),
        pytest.param(20, 100, 2, 12, marks=slow),
        pytest.param(30, 110, 1, 8, marks=slow),
    ],
)
def test_rocketkv_attends_to_the_best_pages_of_what_is_kept(budget, kept_of, page, channels):
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    policy = RocketKV(budget=budget, kept=kept_of, window=16, kernel=7)
    assert (policy.page_size, policy.channels(16)) == (page, channels)
    theirs = [reference.RocketKV(budget, kept_of, 16, 7, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)]

    approximate = jax.jit(functools.partial(policy.approximate, scoring=Scoring(0.25)))

    def check(layer, row, one, q):
        assert all(kept(layer, row, head) == one.kept(head) for head in range(KV_HEADS))
        assert (np.asarray(layer.tokens)[:, row] == min(budget, len(one.kept(0)))).all()
        queries = np.broadcast_to(q.reshape(1, KV_HEADS, 2, -1), (len(LENGTHS), KV_HEADS, 2, q.shape[-1]))
        for head, worth in enumerate(np.asarray(approximate(queries, layer.state))[row]):
            places = np.argsort(-worth, kind="stable")[: min(budget, len(one.kept(head)))]
            assert sorted(np.asarray(layer.state.positions)[row, head][places]) == one.chosen(q)[head]

    compare(policy, theirs, prompt, new, check)


def test_rocketkv_finds_what_its_first_stage_has_kept():
    """A key like a later query, that the last queries of the prompt turn away from: kept with room for all, else forgotten."""
    prompt, new = draw((250,), 1)
    along = new[0][0, 0, ::2]  # of each KV head
    new[0][0, 0, 1::2] = along
    prompt[1][0, 101], prompt[2][0, 101] = 8 * along, 5.0
    prompt[0][0, -32:] = prompt[0][0, 218:250] = -np.repeat(along, 2, axis=0)
    for room, there in ((250, True), (64, False)):
        layer = Layer(RocketKV(budget=32, kept=room, kernel=1), (250,), *prompt)
        found = layer.step(*(x[0] for x in new))
        assert [101 in kept(layer, 0, head) for head in range(KV_HEADS)] == [there] * KV_HEADS
        assert np.allclose(found, 5.0, atol=0.1) == there


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (RocketKV, dict(budget=31), "budget must be at least 32, got 31"),
        (RocketKV, dict(kept=255), "kept must be at least 256, got 255"),
        (RocketKV, dict(window=0), "window must be at least 1, got 0"),
        (RocketKV, dict(kernel=4), "kernel must be an odd number, got 4"),
    ],
    ids=str,
)
def test_bad_options_say_what_is_expected(kind, options, message):
    with pytest.raises(icejax.InputError, match=f"^{message}$"):
        kind(**options)
