"""Evicting policies with a budget per layer (PyramidKV) or per KV head (AdaKV): budgets, kept tokens and outputs."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

import icejax
from icejax.cache.bases.eviction import Slots
from icejax.cache.registry import AdaKV, LaCache, PyramidKV, RocketKV, ShadowKV, SnapKV, Streaming, Tolerant, VAttention
from icejax.engine import prefill
from tests import tolerances
from tests.helpers.layer import HEADS, KV_HEADS, Layer, attention, dense, draw
from tests.helpers.run import plan_for

LENGTHS, STEPS = (250, 9, 120), 64
SHARES = np.asarray([0.5, 1.5])  # of the mean budget, for each KV head


@dataclass(frozen=True)
class Uneven(Streaming):
    """Streaming whose first KV head keeps a third as many tokens as the second, at every step."""

    def most(self, kv_heads) -> int:
        return int(SHARES.max() * self.budget)

    def budgets(self, tokens: Slots):
        shares = (SHARES * self.budget).astype(np.int32)
        return jnp.broadcast_to(jnp.asarray(shares)[None], tokens.positions.shape[:2])


def kept_positions(layer: Layer) -> list[list[np.ndarray]]:
    """Returns the sorted kept positions of every row and KV head."""
    positions = np.asarray(layer.state.positions)
    return [[np.sort(head[head >= 0]) for head in row] for row in positions]


def assert_attends_to(layer: Layer, actual: np.ndarray, prompt, new, step: int) -> None:
    """Asserts that a step's output is dense attention over the kept tokens."""
    for row, heads in enumerate(kept_positions(layer)):
        k, v = (np.concatenate([p[row, : LENGTHS[row]], n[: step + 1, row]]) for p, n in zip(prompt[1:], new[1:], strict=True))
        for head, positions in enumerate(heads):
            group = slice(head * HEADS // KV_HEADS, (head + 1) * HEADS // KV_HEADS)
            expected = attention(new[0][step, row, group], k[positions, head : head + 1], v[positions, head : head + 1])
            np.testing.assert_allclose(actual[row, group], expected, rtol=0, atol=tolerances.EXACT)


def test_pyramid_equals_its_own_code_where_nothing_is_rounded():
    """With 13 and with 20 layers KVCache-Factory's step from budget to budget is a whole number."""
    low, high = (128 - 8) // 20, 2 * (128 - 8) - (128 - 8) // 20
    for layers, step in ((13, 19), (20, 12)):
        policies = PyramidKV(budget=128, window=8).for_layers(range(layers), of=layers)
        assert [policy.budget for policy in policies] == [8 + high - step * i for i in range(layers)] and policies[
            -1
        ].budget == 8 + low
    assert PyramidKV(budget=128).for_layers([3], of=4)[0].budget == 128


def test_budgets_of_a_pyramid_sum_up_to_what_was_asked():
    options = dict(window=12, kernel=3, pooling="max", group="sum")
    for layers in range(1, 40):
        for budget, beta in ((12, 20), (64, 20), (77, 1), (101, 3), (1000, 7)):
            policies = PyramidKV(budget=budget, beta=beta, **options).for_layers(range(layers), of=layers + 2)
            sizes = [policy.budget for policy in policies]
            assert sum(sizes) == layers * budget and sizes == sorted(sizes, reverse=True)
            assert policies == [SnapKV(budget=size, **options) for size in sizes]


@pytest.mark.slow
def test_pyramid_of_a_model_keeps_what_snapkv_keeps_per_layer(bundled):
    model, prompt = bundled[0], np.random.default_rng(0).integers(0, 256, 200).tolist()
    sizes = [102, 77, 51, 26]

    def layer_positions(policy) -> list[np.ndarray]:
        state, *_ = prefill.prefill(model, [prompt], plan_for(model, policy, [prompt], 8))
        return [np.asarray(layer.positions[0]) for layer in state.cache.layers]

    actual, first, last = (
        layer_positions(x) for x in (PyramidKV(budget=64, window=24), *(SnapKV(budget=n, window=24) for n in (102, 26)))
    )
    assert [(layer >= 0).sum(-1).tolist() for layer in actual] == [[n] * len(actual[0]) for n in sizes]
    for layer, expected in ((actual[0], first[0]), (actual[-1], last[-1])):
        np.testing.assert_array_equal(layer[:, : expected.shape[1]], expected)


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (AdaKV, dict(floor=1.5), "floor must be a number from 0 to 1, got 1.5"),
        (AdaKV, dict(kernel=2), "kernel must be an odd number, got 2"),
        (PyramidKV, dict(beta=0), "beta must be at least 1, got 0"),
        (PyramidKV, dict(budget=31), "budget must be at least 32, got 31"),
        (Tolerant, dict(budget=2**29), "budget must be at most 268435456, got 536870912"),
        (LaCache, dict(budget=3_000_000, rungs=1024), "budget must be at most 2097151, got 3000000"),
    ],
    ids=str,
)
def test_bad_options_say_what_is_expected(kind, options, message):
    with pytest.raises(icejax.InputError, match=f"^{message}$"):
        kind(**options)


def test_each_kv_head_evicts_within_its_own_room():
    """Over 64 steps and a later text; every head is allocated the slots of the largest."""
    prompt, new = draw(LENGTHS, STEPS + 30)
    policy = Uneven(budget=40, reassign=False)
    layer, decoded = Layer(policy, LENGTHS, *prompt), [x[:STEPS] for x in new]

    def assert_newest(num_new: int) -> None:
        for length, heads in zip(LENGTHS, kept_positions(layer), strict=True):
            for positions, size in zip(heads, (20, 60), strict=True):
                all_positions = np.arange(length + num_new)
                expected = (
                    all_positions
                    if len(all_positions) <= size
                    else np.concatenate([all_positions[:4], all_positions[4 - size :]])
                )
                np.testing.assert_array_equal(positions, expected)

    assert_newest(0)
    for step in range(STEPS):
        out = layer.step(*(x[step] for x in decoded))
        assert_newest(step + 1)
        assert_attends_to(layer, out, prompt, new, step)
    layer.extend(*(x[STEPS:].swapaxes(0, 1) for x in new), [30] * len(LENGTHS))
    assert_newest(STEPS + 30)
    report = policy.report(layer.state, layer.lengths)
    np.testing.assert_array_equal(report.slots, [80, 80, 80])
    assert report.allocated == 2 * 60


@pytest.mark.parametrize("budget", [48, pytest.param(100, marks=pytest.mark.slow)])
def test_heads_compete_for_the_budget_of_all(budget):
    """AdaKV keeps as many tokens as SnapKV, those of highest score over all heads; decoded tokens come on top."""
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    policies = SnapKV(budget=budget, window=16), AdaKV(budget=budget, window=16, floor=0.0)
    snapkv, adakv = (Layer(policy, LENGTHS, *prompt) for policy in policies)
    scores = np.asarray(Layer(SnapKV(budget=256, window=16), LENGTHS, *prompt).state.scores)  # budget for all
    for row, length in enumerate(LENGTHS):
        sizes = [len(x) for x in kept_positions(adakv)[row]]
        assert sum(sizes) == min(KV_HEADS * budget, KV_HEADS * length) == sum(len(x) for x in kept_positions(snapkv)[row])
        row_scores = scores[row, :, :length].reshape(-1)
        expected = np.sort(np.argsort(-row_scores, kind="stable")[: KV_HEADS * budget])
        actual = np.sort(np.concatenate([head * length + x for head, x in enumerate(kept_positions(adakv)[row])]))
        np.testing.assert_array_equal(actual, expected)
    assert len({len(x) for x in kept_positions(adakv)[0]}) == 2
    before = [[len(x) for x in row] for row in kept_positions(adakv)]
    for step in range(STEPS):
        out = adakv.step(*(x[step] for x in new))
        assert_attends_to(adakv, out, prompt, new, step)
    assert [[len(x) - STEPS for x in row] for row in kept_positions(adakv)] == before


@pytest.mark.parametrize(
    "floor, least, most, room", [(0.0, 9, 229, 232), (0.2, 20, 196, 198), (0.55, 38, 137, 139), (1.0, 64, 64, 64)]
)
def test_spread_heads_get_more_and_none_less_than_the_floor(floor, least, most, room):
    """The queries of three KV heads match one key each, those of the fourth all keys; slots are allocated for the largest.

    Beside windows of 8 the heads win 1, 1, 1 and 221 of 224 tokens. A floor of 0.2 leaves them 0.8 and 176.8 of these, plus 11.
    """
    prompt, _ = draw((250,), 1, sharp=0.01, kv_heads=4)
    prompt[0][:, :, :3] = prompt[1][:, 40, None, :3] * 400
    policy = AdaKV(budget=64, window=8, kernel=1, floor=floor)
    layer = Layer(policy, (250,), *prompt)
    assert [len(x) for x in kept_positions(layer)[0]] == [least] * 3 + [most]
    slots = layer.state.positions.shape[2]
    assert slots == room + layer.spec.new_capacity
    assert policy.report(layer.state, layer.lengths).allocated == 4 * slots


@pytest.mark.parametrize(
    "policy, exact",
    [
        (RocketKV(budget=300_000_000), True),
        (LaCache(budget=2_000_000, recent=32, rungs=1024), True),
        (ShadowKV(outliers=0), False),
        (VAttention(delta=1e-17), False),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_options_at_their_ends_leave_numbers(policy, exact):
    prompt, new = draw((200,), 1)
    out = Layer(policy, (200,), *prompt).step(*(x[0] for x in new))[0]
    assert np.isfinite(out).all() and (out != 0).any()
    if exact:
        np.testing.assert_allclose(out, dense(prompt, new, (200,), 0)[0], rtol=0, atol=tolerances.EXACT)
