"""The contract that every cache policy passes."""

import jax
import numpy as np
import pytest

from icejax.cache import Clustered
from tests import tolerances
from tests.layer import Layer, dense, draw, programs
from tests.policies import POLICIES

LENGTHS, STEPS = (250, 9, 100), 40
policies = pytest.mark.parametrize("row", POLICIES, ids=str)


@policies
def test_budget_for_all_tokens_equals_dense_attention(row):
    prompt, new = draw(LENGTHS, STEPS)
    layer = Layer(row.exact(max(LENGTHS) + STEPS), LENGTHS, *prompt)
    for step in range(STEPS):
        found = layer.step(*(x[step] for x in new))
        np.testing.assert_allclose(
            found, dense(prompt, new, LENGTHS, step), rtol=0, atol=tolerances.EXACT, err_msg=f"step {step}"
        )


@policies
def test_nan_in_padding_and_empty_slots_never_leaks(row):
    prompt, new = draw(LENGTHS, STEPS)
    clean = Layer(row.small, LENGTHS, *prompt)
    expected = [clean.step(*(x[step] for x in new)) for step in range(STEPS)]
    for x in prompt:
        for i, length in enumerate(LENGTHS):
            x[i, length:] = np.nan
    dirty = Layer(row.small, LENGTHS, *prompt)
    for step in range(STEPS):
        np.testing.assert_array_equal(dirty.step(*(x[step] for x in new)), expected[step], err_msg=f"step {step}")


@policies
def test_newest_token_is_attended(row):
    prompt, new = draw(LENGTHS, STEPS)
    new[0][:] *= 100.0
    for step in range(STEPS):  # the newest key is what its queries ask for, so nothing else may weigh
        groups = new[0][step].reshape(len(LENGTHS), 2, 2, -1)
        groups[:, :, 1] = groups[:, :, 0]
        new[1][step] = groups[:, :, 0] / np.linalg.norm(groups[:, :, 0], axis=-1, keepdims=True) * 30.0
    layer = Layer(row.small, LENGTHS, *prompt)
    for step in range(STEPS):
        found = layer.step(*(x[step] for x in new))
        np.testing.assert_allclose(found, np.repeat(new[2][step], 2, axis=1), rtol=0, atol=1e-3, err_msg=f"step {step}")


@policies
def test_rows_of_a_ragged_batch_equal_the_rows_alone(row):
    prompt, new = draw(LENGTHS, STEPS)
    together = Layer(row.small, LENGTHS, *prompt)
    alone = [Layer(row.small, LENGTHS[i : i + 1], *(x[i : i + 1] for x in prompt)) for i in range(len(LENGTHS))]
    for step in range(STEPS):
        found = together.step(*(x[step] for x in new))
        for i, layer in enumerate(alone):
            expected = layer.step(*(x[step, i : i + 1] for x in new))[0]
            np.testing.assert_allclose(found[i], expected, rtol=0, atol=tolerances.EXACT, err_msg=f"step {step}, row {i}")


@policies
def test_one_trace_of_the_decode_program(row):
    programs.cache_clear()
    prompt, new = draw(LENGTHS, STEPS)
    layer = Layer(row.small, LENGTHS, *prompt)
    for step in range(STEPS):
        layer.step(*(x[step] for x in new))
    assert layer.programs.traces == [1]


@policies
def test_state_is_a_plain_pytree(row):
    prompt, _ = draw(LENGTHS, 1)
    layer = Layer(row.small, LENGTHS, *prompt)
    shapes = jax.eval_shape(lambda: row.small.init(layer.spec))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), layer.state)


def test_clustered_attends_to_no_more_tokens_than_its_budget():
    """Values are one-hot by position, so the output says which tokens had weight."""
    lengths, steps = (200,), 40
    prompt, new = draw(lengths, steps, sharp=0.01)
    policy = Clustered(budget=64, tail=False)
    attended = []
    for seen in range(0, 240, 16):  # sixteen positions at a time, in the sixteen channels of the values
        for x, start in ((prompt[2], 0), (new[2], 200)):
            x[:] = 0
            for position in range(seen, seen + 16):
                at = position - start
                if start == 0 and 0 <= at < 200:
                    x[:, at, :, position - seen] = 1
                elif start == 200 and 0 <= at < steps:
                    x[at, :, :, position - seen] = 1
        layer = Layer(policy, lengths, *prompt)
        attended.append(np.stack([layer.step(*(x[step] for x in new)) for step in range(steps)]) > 0)
    counts = np.concatenate(attended, axis=-1).sum(-1)  # [step, row, head]
    assert counts.max() <= 64
    assert counts.min() > 64 - 16  # and the budget is used


def test_clustered_finds_a_planted_needle():
    """A key like the query, alone in a far part of the prompt, is fetched among pages of noise."""
    for at in (40, 111, 222):
        prompt, new = draw((250,), 1, seed=at)
        for kv in range(2):
            direction = new[0][0, 0, 2 * kv]
            new[0][0, 0, 2 * kv + 1] = direction
            prompt[1][0, at, kv] = direction * 6.0
        layer = Layer(Clustered(budget=64), (250,), *prompt)
        found = layer.step(*(x[0] for x in new))
        np.testing.assert_allclose(found, dense(prompt, new, (250,), 0), atol=0.05)


def test_small_budgets_fetch_as_many_pages_as_one_of_256():
    assert [Clustered(budget=n).num_fetched(1000) for n in (64, 256, 512)] == [56, 56, 120]
    assert Clustered(budget=64, page_size=8).num_fetched(1000) == 112 and Clustered(budget=64).num_fetched(20) == 20
    assert [Clustered(budget=64, candidates=n).num_fetched(1000) for n in (1, 4)] == [4, 16]
