"""What a step estimates of its own error, and what heads above a tolerance do, against plain numpy."""

from dataclasses import replace

import numpy as np
import pytest

import icejax
from icejax.cache.options import make_policy
from icejax.cache.policies.tolerant import COVERED, Tolerant
from icejax.cache.registry import Clustered
from icejax.checks.errors import InputError
from tests import tolerances
from tests.helpers import layer
from tests.helpers.layer import Layer, attention, draw, uneven
from tests.reference.clustered import Reference

LENGTHS, GROUP = (250, 180), layer.HEADS // layer.KV_HEADS
FEW = Clustered(budget=48, page_size=8, sinks=6, window=14, candidates=2, keys_first=False)
MANY = replace(FEW, budget=96)


def tolerant(tolerance: float) -> Tolerant:
    return Tolerant(budget=48, page_size=8, candidates=2, tolerance=tolerance, max_budget=96)


@pytest.mark.parametrize(
    ("tolerance", "steps"), [(0.3, 5), *(pytest.param(x, 20, marks=pytest.mark.slow) for x in (0.3, 1e3, 1e-9))]
)
def test_the_estimate_and_what_follows_from_it_equal_plain_numpy(tolerance, steps):
    mix = np.random.default_rng(1).standard_normal((layer.SIZE, layer.SIZE)).astype(np.float32) / layer.SIZE**0.5
    prompt, new = ((*uneven(q, k), v + k @ mix) for q, k, v in draw(LENGTHS, steps, sharp=1.5))
    ours = Layer(tolerant(tolerance), LENGTHS, *prompt)
    few, many = (
        {
            (row, kv): Reference(
                policy, prompt[0][row, :, kv * GROUP : kv * GROUP + GROUP], *(x[row, :, kv] for x in prompt[1:]), LENGTHS[row]
            )
            for row in range(2)
            for kv in range(layer.KV_HEADS)
        }
        for policy in (FEW, MANY)
    )
    gains = [gain([few[row, kv] for kv in range(layer.KV_HEADS)], *(x[row] for x in prompt), LENGTHS[row]) for row in range(2)]
    np.testing.assert_allclose(ours.state.gain, gains, rtol=1e-3)
    more = []
    for step in range(steps):
        out = ours.step(*(x[step] for x in new))
        errors = np.zeros((2, layer.KV_HEADS))
        for (row, kv), reference in few.items():
            heads = slice(kv * GROUP, kv * GROUP + GROUP)
            token = (new[0][step, row, heads], new[1][step, row, kv], new[2][step, row, kv])
            expected, told = step_of(reference, *token)
            again = step_of(many[row, kv], *token)
            more.append(COVERED * gains[row] * told > tolerance)
            if more[-1]:
                expected, told = again
            errors[row, kv] = COVERED * gains[row] * told
            np.testing.assert_allclose(out[row, heads], expected, rtol=0, atol=tolerances.EXACT)
        np.testing.assert_allclose(ours.state.error, errors.mean(1), rtol=2e-3)
        budgets = ours.policy.report(ours.state, ours.lengths).estimates[1]
        assert (np.asarray(budgets) <= np.reshape(more[-4:], (2, 2)).mean(1) * 48 + 48).all()
    assert all(more) if tolerance < 0.3 else not any(more) if tolerance > 1 else 0 < np.mean(more) < 1, np.mean(more)


def step_of(reference: Reference, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns the output of a step, and how uneven the weights are, mean over heads."""
    told: list[np.ndarray] = []
    look = type(reference).look

    def remember(*args):
        found = look(reference, *args)
        told.append(found[1])
        return found

    reference.look = remember
    return reference.step(q, k, v), float(told[0].mean())


def gain(heads: list[Reference], q: np.ndarray, k: np.ndarray, v: np.ndarray, length: int) -> float:
    """Returns the true errors of the prompt's last four tokens over how uneven weights are, means over heads."""
    true, told = 0.0, 0.0
    for seen in range(length, length - 4, -1):
        exact = attention(q[seen - 1], k[:seen], v[:seen])
        for kv, reference in enumerate(heads):
            mine = slice(kv * GROUP, kv * GROUP + GROUP)
            near = [*reference.sinks, *(token for token in reference.window if token < seen)]
            out, uneven = reference.look(q[seen - 1, mine].astype(np.float64) / reference.factors, np.asarray(near, int))
            true += (np.linalg.norm(out - exact[mine], axis=-1) / np.linalg.norm(exact[mine], axis=-1)).sum()
            told += uneven.sum()
    return true / told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(tolerance=0), "tolerance must be a number above 0 and at most 1000, got 0"),
        (dict(tolerance=float("nan")), "tolerance must be a number above 0 and at most 1000, got nan"),
        (dict(max_budget=100), "max_budget must be at least 256, got 100"),
        (dict(tail=False), "cache 'tolerant' has no option 'tail': expected one of budget, "),
        (dict(resident=True), "cache 'tolerant' has no option 'resident': expected one of budget, "),
    ],
)
def test_what_leaves_nothing_to_estimate_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        make_policy("tolerant", options)


@pytest.mark.slow
def test_an_answer_tells_its_error_and_its_budget():
    model, tokenizer = icejax.load()
    text = "".join(
        f"Pass key {a}{b}:{17 * i + 10000}.\n" for i, (a, b) in enumerate((a, b) for a in "abcdefgh" for b in "klmnopqrstuv")
    )
    prompt = tokenizer.encode(text + "Pass key cn:", add_special_tokens=False)

    def answer(policy):
        return icejax.generate(model, tokenizer, prompt, cache=policy, max_new_tokens=8)[0]

    plain, loose, tight = (
        answer(x)
        for x in (
            Clustered(budget=64, keys_first=False),
            Tolerant(budget=64, tolerance=1e3),
            Tolerant(budget=64, tolerance=1e-3),
        )
    )
    assert plain.estimated_error is plain.budget_used is None
    assert loose.token_ids == plain.token_ids and loose.budget_used == 64 and loose.pages_fetched == plain.pages_fetched
    assert (
        0 < tight.estimated_error < loose.estimated_error < 1
        and tight.pages_fetched > loose.pages_fetched
        and 64 < tight.budget_used <= 1024
    )
