"""The tolerant policy against plain numpy: a step's estimated error, and the larger budget of heads above the tolerance."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

import icejax
from icejax.cache.bases.two_precisions import COVERED as TOO_SMALL
from icejax.cache.options import make_policy
from icejax.cache.policies.tolerant import COVERED, Tolerant
from icejax.cache.registry import Clustered
from icejax.checks.errors import InputError
from tests import tolerances
from tests.helpers import layer
from tests.helpers.layer import Layer, attention, draw, uneven
from tests.reference.clustered import Reference
from tests.reference.looked import Looked

LENGTHS, GROUP = (250, 180), layer.HEADS // layer.KV_HEADS
SIZES = dict(budget=48, page_size=8, candidates=2)
FEW = Clustered(**SIZES, sinks=6, window=14, keys_first=False)
MANY = replace(FEW, budget=96)


@pytest.mark.slow
@pytest.mark.parametrize(("tolerance", "steps"), [(0.3, 5), *((x, 20) for x in (0.3, 1e3, 1e-9))])
def test_the_estimate_and_what_follows_from_it_equal_plain_numpy(tolerance, steps):
    assert_steps(Tolerant(**SIZES, tolerance=tolerance, max_budget=96), (FEW, MANY), Reference, steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tolerance", "look", "steps"), [(0.2, 4, 5), (0.2, 4, 200), (0.2, 2, 20), (1e3, 4, 20), (1e-9, 8, 20)]
)
def test_a_look_in_codes_equals_plain_numpy(tolerance, look, steps):
    """The first round looks at 10 pages, the second at all."""
    policies = (replace(x, keys_first=None, look=look, looked=looked) for x, looked in ((FEW, 10), (MANY, 100)))
    options = dict(SIZES, compact_every=64, look=look, looked=10)
    policies = [replace(x, compact_every=64) for x in policies]
    assert_steps(Tolerant(**options, tolerance=tolerance, max_budget=96), policies, Looked, steps)


def assert_steps(policy: Tolerant, policies: Sequence[Clustered], reference: type[Reference], steps: int) -> None:
    """Asserts that steps of a policy equal those of references, whose policies have its budgets."""
    tolerance = policy.tolerance
    mix = np.random.default_rng(1).standard_normal((layer.SIZE, layer.SIZE)).astype(np.float32) / layer.SIZE**0.5
    prompt, new = ((*uneven(q, k), v + k @ mix) for q, k, v in draw(LENGTHS, steps, sharp=1.5))
    cache = Layer(policy, LENGTHS, *prompt)
    few, many = (
        {
            (row, kv): reference(
                x, prompt[0][row, :, kv * GROUP : kv * GROUP + GROUP], *(y[row, :, kv] for y in prompt[1:]), LENGTHS[row]
            )
            for row in range(2)
            for kv in range(layer.KV_HEADS)
        }
        for x in policies
    )
    gains = [gain([few[row, kv] for kv in range(layer.KV_HEADS)], *(x[row] for x in prompt), LENGTHS[row]) for row in range(2)]
    np.testing.assert_allclose(cache.state.gain, gains, rtol=1e-3, atol=1e-6)
    exceeded = []
    for step in range(steps):
        out = cache.step(*(x[step] for x in new))
        errors = np.zeros((2, layer.KV_HEADS))
        for (row, kv), reference in few.items():
            heads = slice(kv * GROUP, kv * GROUP + GROUP)
            token = (new[0][step, row, heads], new[1][step, row, kv], new[2][step, row, kv])
            expected, estimate = step_of(reference, *token, gains[row])
            with_more = step_of(many[row, kv], *token, gains[row])
            exceeded.append(estimate > tolerance)
            if exceeded[-1]:
                expected, estimate = with_more
            errors[row, kv] = estimate
            np.testing.assert_allclose(out[row, heads], expected, rtol=0, atol=tolerances.EXACT)
        np.testing.assert_allclose(cache.state.error, errors.mean(1), rtol=2e-3)
        budgets = cache.policy.report(cache.state, cache.lengths).estimates[1]
        assert (np.asarray(budgets) <= np.reshape(exceeded[-4:], (2, 2)).mean(1) * 48 + 48).all()
    share = np.mean(exceeded)
    assert share == (tolerance < 1) if tolerance in (1e3, 1e-9) else 0 < share < 1, share


def step_of(reference: Reference, q: np.ndarray, k: np.ndarray, v: np.ndarray, gain: float) -> tuple[np.ndarray, float]:
    """Returns the output of a step, and its estimated error, mean over query heads."""
    recorded: list[np.ndarray] = []
    look = type(reference).look

    def recording_look(*args):
        result = look(reference, *args)
        recorded.append(result[1])
        return result

    reference.look = recording_look
    out = reference.step(q, k, v)
    return out, COVERED * np.hypot(gain * recorded[0], of_codes(reference)).mean()


def of_codes(reference: Reference) -> np.ndarray | float:
    """Returns the error of the codes in a reference's newest look; 0 without codes."""
    return reference.of_codes * TOO_SMALL[reference.policy.look] if isinstance(reference, Looked) else 0.0


def gain(heads: list[Reference], q: np.ndarray, k: np.ndarray, v: np.ndarray, length: int) -> float:
    """Returns the ratio of true error, without that of codes, to `uneven`: sums over the prompt's last four tokens and all heads."""
    error_sum, uneven_sum, codes_sum = 0.0, 0.0, 0.0
    for num_keys in range(length, length - 4, -1):
        exact = attention(q[num_keys - 1], k[:num_keys], v[:num_keys])
        for kv, reference in enumerate(heads):
            group = slice(kv * GROUP, kv * GROUP + GROUP)
            resident = [*reference.sinks, *(token for token in reference.window if token < num_keys)]
            out, uneven = reference.look(
                q[num_keys - 1, group].astype(np.float64) / reference.factors, np.asarray(resident, int)
            )
            error_sum += (np.linalg.norm(out - exact[group], axis=-1) / np.linalg.norm(exact[group], axis=-1)).sum()
            uneven_sum += uneven.sum()
            codes_sum += np.sum(of_codes(reference) * np.ones(GROUP))
    return max(error_sum**2 - codes_sum**2, 0) ** 0.5 / uneven_sum


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(tolerance=0), "tolerance must be a number above 0 and at most 1000, got 0"),
        (dict(tolerance=float("nan")), "tolerance must be a number above 0 and at most 1000, got nan"),
        (dict(max_budget=100), "max_budget must be at least 256, got 100"),
        (dict(look=5), "look must be one of None, 2, 3, 4, 8, got 5"),
        (dict(look=4, page_dtype="int8"), "look=4 needs page_dtype=none, got 'int8': leave look out"),
        (dict(looked=40), "looked=40 needs look, the bits of the codes: set look=4, or leave looked out"),
        (dict(look=4, looked=11), "looked must be at least 12, whose tokens fill the budget, got 11"),
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

    clustered, loose, tight = (
        answer(x)
        for x in (
            Clustered(budget=64, keys_first=False),
            Tolerant(budget=64, tolerance=1e3),
            Tolerant(budget=64, tolerance=1e-3),
        )
    )
    assert clustered.estimated_error is clustered.budget_used is None
    assert loose.token_ids == clustered.token_ids and loose.budget_used == 64 and loose.pages_fetched == clustered.pages_fetched
    assert (
        0 < tight.estimated_error < loose.estimated_error < 1
        and tight.pages_fetched > loose.pages_fetched
        and 64 < tight.budget_used <= 1024
    )
