"""The contract that every cache policy passes, and properties of the clustered policy's budget."""

import jax
import numpy as np
import pytest

import icejax
from icejax.cache.registry import Clustered, Full
from icejax.session.session import Session
from tests import tolerances
from tests.helpers import families
from tests.helpers.layer import Layer, attended, dense, draw
from tests.helpers.letters import Letters
from tests.helpers.policies import EXACT, OF_BASES, POLICIES, by_row

LENGTHS, STEPS = (250, 9, 100), 40
# Tests of budgets for all tokens share programs, and have a soft cap of scores as in Gemma 2; other tests have none.
TOTAL, SOFTCAP = 350, 2.0
policies = pytest.mark.parametrize("row", by_row())
exact_ones = pytest.mark.parametrize("row", by_row(rows=EXACT))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return families.load(families.build(families.row("llama-gqa"), num_hidden_layers=1), tmp_path_factory.mktemp("model"))


@exact_ones
def test_budget_for_all_tokens_equals_dense_attention(row):
    prompt, new = draw(LENGTHS, STEPS)
    layer = Layer(row.exact(TOTAL), LENGTHS, *prompt, softcap=SOFTCAP)
    for step in range(STEPS):
        out = layer.step(*(x[step] for x in new))
        expected = dense(prompt, new, LENGTHS, step, SOFTCAP)
        np.testing.assert_allclose(out, expected, rtol=0, atol=tolerances.EXACT, err_msg=f"step {step}")


@pytest.mark.slow
def test_sinks_may_be_most_of_a_budget():
    """With that many sinks fewer tokens of pages are ranked than the budget holds."""
    prompt, new = draw((256,), 1)
    out = Layer(Clustered(budget=264, sinks=200, candidates=1), (256,), *prompt).step(*(x[0] for x in new))
    np.testing.assert_allclose(out, dense(prompt, new, (256,), 0), rtol=0, atol=tolerances.EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("keys_first", [True, False])
def test_full_budget_with_unfilled_sinks_equals_dense_attention(keys_first):
    lengths, steps = (1, 5, 40), 180
    prompt, new = draw(lengths, steps)
    layer = Layer(Clustered(budget=220, keys_first=keys_first), lengths, *prompt)
    for step in range(steps):
        out = layer.step(*(x[step] for x in new))
        np.testing.assert_allclose(
            out, dense(prompt, new, lengths, step), rtol=0, atol=tolerances.EXACT, err_msg=f"step {step}"
        )


@policies
def test_nan_in_padding_and_empty_slots_never_leaks(row):
    """The steps, before and after flushes and compactions, have one trace."""
    prompt, new = draw(LENGTHS, STEPS)
    clean = Layer(row.small, LENGTHS, *prompt)
    expected = [clean.step(*(x[0] for x in new))]
    traces = clean.programs.traces[0]
    expected += [clean.step(*(x[step] for x in new)) for step in range(1, STEPS)]
    for x in prompt:
        for i, length in enumerate(LENGTHS):
            x[i, length:] = np.nan
    dirty = Layer(row.small, LENGTHS, *prompt)
    for step in range(STEPS):
        np.testing.assert_array_equal(dirty.step(*(x[step] for x in new)), expected[step], err_msg=f"step {step}")
    assert dirty.programs.traces == [traces]


@policies
def test_newest_token_is_attended(row):
    prompt, new = draw(LENGTHS, STEPS)
    new[0][:] *= 100.0
    for step in range(STEPS):  # the newest key matches its queries, so nothing else may weigh
        groups = new[0][step].reshape(len(LENGTHS), 2, 2, -1)
        groups[:, :, 1] = groups[:, :, 0]
        new[1][step] = groups[:, :, 0] / np.linalg.norm(groups[:, :, 0], axis=-1, keepdims=True) * 30.0
    layer = Layer(row.small, LENGTHS, *prompt)
    for step in range(STEPS):
        out = layer.step(*(x[step] for x in new))
        np.testing.assert_allclose(out, np.repeat(new[2][step], 2, axis=1), rtol=0, atol=row.rounding, err_msg=f"step {step}")


@policies
def test_rows_of_a_ragged_batch_equal_the_rows_alone(row):
    prompt, new = draw(LENGTHS, STEPS)
    together = Layer(row.small, LENGTHS, *prompt)
    alone = [Layer(row.small, LENGTHS[i : i + 1], *(x[i : i + 1] for x in prompt)) for i in range(len(LENGTHS))]
    for step in range(STEPS):
        out = together.step(*(x[step] for x in new))
        for i, layer in enumerate(alone):
            expected = layer.step(*(x[step, i : i + 1] for x in new))[0]
            np.testing.assert_allclose(out[i], expected, rtol=0, atol=tolerances.EXACT, err_msg=f"step {step}, row {i}")


@pytest.mark.parametrize(
    "row, enough",
    [*by_row(True, rows=EXACT), *by_row(False, rows=[row for row in POLICIES if row.keeps_all], slow=True)],
)
def test_more_tokens_behind_a_cache_see_all_before_them(row, enough):
    """After steps that flush and compact; padding holds NaN.

    With a budget for all tokens the decode steps are exact too. The log-sum-exp, which layers with attention sinks need, is
    compared as well.
    """
    new = (30, 7, 50)
    prompt, _ = draw(LENGTHS, 1)
    rng = np.random.default_rng(1)
    text = [np.concatenate([x, rng.standard_normal((3, TOTAL - x.shape[1], *x.shape[2:])).astype(x.dtype)], 1) for x in prompt]
    softcap = SOFTCAP if enough else None
    layer = Layer(row.exact(TOTAL) if enough else row.small, LENGTHS, *(x[:, :256] for x in text), softcap=softcap)
    positions = np.asarray(LENGTHS)

    def check(out, lse, step) -> None:
        for i, position in enumerate(positions + step):
            expected = attended(text[0][i, position], *(x[i, : position + 1] for x in text[1:]), softcap)
            for actual, reference in zip((out[i], lse[i]), expected, strict=True):
                np.testing.assert_allclose(actual, reference, rtol=0, atol=tolerances.EXACT, err_msg=f"row {i}, {position}")

    def steps() -> None:
        for step in range(STEPS // 2):
            step_out = layer.step(*(np.stack([x[i, p + step] for i, p in enumerate(positions)]) for x in text))
            if enough:
                check(step_out, layer.lse, step)

    steps()
    positions += STEPS // 2
    chunk = [np.full((3, 256, *x.shape[2:]), np.nan, np.float32) for x in text]
    for x, part in zip(text, chunk, strict=True):
        for i, position in enumerate(positions):
            part[i, : new[i]] = x[i, position : position + new[i]]
    extended = layer.extend(*chunk, new)
    for step in range(min(new)):
        check(extended[:, step], layer.lse[:, step], step)
    check(*([x[i, count - 1] for i, count in enumerate(new)] for x in (extended, layer.lse)), np.asarray(new) - 1)
    positions += np.asarray(new)
    steps()


@pytest.mark.slow
@pytest.mark.parametrize("row", OF_BASES, ids=str)
def test_a_session_asks_twice_and_is_kept(row, tmp_path, model):
    """With a budget for all tokens the second answer equals that to one long text, before and after saving."""
    session = Session(model, Letters(), cache=row.exact(600), context_length=500)
    first = session.ask("a" * 150 + "bcd", max_new_tokens=20)
    session.save(tmp_path / "kept")
    loaded = Session.load(tmp_path / "kept", model, Letters())
    second, resumed = (x.ask("zyx" * 20, max_new_tokens=20) for x in (session, loaded))
    whole_text = Letters().decode(session.token_ids[: 153 + first.new_tokens + 60])
    (expected,) = icejax.generate(model, Letters(), whole_text, cache=Full(), max_new_tokens=20)
    assert first.new_tokens == 20 and second.token_ids == resumed.token_ids == expected.token_ids


@policies
def test_state_is_a_plain_pytree(row):
    prompt, _ = draw(LENGTHS, 1)
    layer = Layer(row.small, LENGTHS, *prompt)
    shapes = jax.eval_shape(lambda: layer.policy.init(layer.spec))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), layer.state)


@pytest.mark.slow
def test_clustered_attends_to_no_more_tokens_than_its_budget():
    """Values are one-hot by position, so the output shows which tokens have weight."""
    lengths, steps = (200,), 40
    prompt, new = draw(lengths, steps, sharp=0.01)
    policy = Clustered(budget=64, tail=False)
    attended = []
    for first in range(0, 240, 16):  # sixteen positions at a time, in the sixteen channels of the values
        for x, start in ((prompt[2], 0), (new[2], 200)):
            x[:] = 0
            for position in range(first, first + 16):
                index = position - start
                if start == 0 and 0 <= index < 200:
                    x[:, index, :, position - first] = 1
                elif start == 200 and 0 <= index < steps:
                    x[index, :, :, position - first] = 1
        layer = Layer(policy, lengths, *prompt)
        attended.append(np.stack([layer.step(*(x[step] for x in new)) for step in range(steps)]) > 0)
    counts = np.concatenate(attended, axis=-1).sum(-1)  # [step, row, head]
    assert counts.max() <= 64
    assert counts.min() > 64 - 16  # the budget is used


def test_clustered_finds_a_planted_needle():
    """A single key like the query, far back in the prompt, is fetched from among pages of noise."""
    for position in (40, 111, 222):
        prompt, new = draw((250,), 1, seed=position)
        for kv in range(2):
            direction = new[0][0, 0, 2 * kv]
            new[0][0, 0, 2 * kv + 1] = direction
            prompt[1][0, position, kv] = direction * 6.0
        layer = Layer(Clustered(budget=64), (250,), *prompt)
        out = layer.step(*(x[0] for x in new))
        np.testing.assert_allclose(out, dense(prompt, new, (250,), 0), atol=0.05)


def test_small_budgets_fetch_as_many_pages_as_one_of_256():
    assert [Clustered(budget=n).num_fetched(1000) for n in (64, 256, 512)] == [56, 56, 120]
    assert Clustered(budget=64, page_size=8).num_fetched(1000) == 112 and Clustered(budget=64).num_fetched(20) == 20
    assert [Clustered(budget=64, candidates=n).num_fetched(1000) for n in (1, 4)] == [4, 16]
