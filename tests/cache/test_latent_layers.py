"""Layers whose values have another size than their keys, and latent ones, whose values are the first channels of their keys."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from icejax.cache.policies.full import Ring
from icejax.cache.registry import Clustered, ExpectedAttention, Full, Quest, ReSTKV, RetroInfer, SnapKV, Streaming, TopK
from icejax.engine.plan import make_plan
from icejax.evaluation import attention_map
from tests import tolerances
from tests.helpers.layer import Layer, attention, draw
from tests.helpers.policies import EXACT

LENGTHS, NEW, STEPS = (250, 9, 100), (30, 7, 50), (36, 8)  # before and behind the new tokens; a page leaves every 16th step
TOTAL = 350
KEYS, VALUES = 24, 16
ALL = Clustered(budget=TOTAL, compact_every=32)


def text(sizes: tuple[int, int], *, latent: bool = False):
    """Returns q, k, v [B, TOTAL, heads, channels] of one KV head."""
    (*heads, v), more = draw(LENGTHS, TOTAL - 256, kv_heads=1, sizes=sizes)
    q, k, v = (np.concatenate([x, y.swapaxes(0, 1)], axis=1) for x, y in zip((*heads, v), more, strict=True))
    return q, k, k[..., : sizes[1]] if latent else v


def run(policy, q, k, v, *, latent: bool = False):
    """Yields the layer, positions [B] and outputs [B, N, Hv] of decoded tokens, of a text taken at once, and of more decoded."""
    layer, at = Layer(policy, LENGTHS, *(x[:, :256] for x in (q, k, v)), latent=latent), np.asarray(LENGTHS)

    def steps(count: int):
        for _ in range(count):
            yield layer, at.copy(), layer.step(*(np.stack([x[i, p] for i, p in enumerate(at)]) for x in (q, k, v)))
            at[:] += 1

    yield from steps(STEPS[0])
    more = [np.full((len(LENGTHS), 256, *x.shape[2:]), np.nan, np.float32) for x in (q, k, v)]
    for x, part in zip((q, k, v), more, strict=True):
        for i, position in enumerate(at):
            part[i, : NEW[i]] = x[i, position : position + NEW[i]]
    found = layer.extend(*more, NEW)
    at += np.asarray(NEW)
    yield layer, at - 1, np.stack([found[i, count - 1] for i, count in enumerate(NEW)])
    yield from steps(STEPS[1])


BOTH = dict(full=Full(), quest=Quest(budget=2 * TOTAL), clustered=ALL, pages=replace(ALL, budget=2 * TOTAL, rerank=False))
BOTH |= dict(topk=TopK(budget=TOTAL), ring=Ring(TOTAL))
APART = dict(  # keep latent values apart
    streaming=Streaming(budget=TOTAL),
    snapkv=SnapKV(budget=TOTAL),
    expected=ExpectedAttention(budget=TOTAL),
    restkv=ReSTKV(budget=TOTAL),
)
BY_DEFAULT = ("latent-topk", "latent-clustered", "latent-quest", "narrow-clustered", "narrow-snapkv")


@pytest.mark.parametrize(
    "policy, sizes, latent",
    [
        pytest.param(*case, id=name, marks=() if name in BY_DEFAULT else pytest.mark.slow)
        for name, case in (
            {f"latent-{row}": (row.exact(TOTAL), (KEYS, VALUES), True) for row in EXACT}
            | {f"latent-{name}": (policy, (KEYS, VALUES), True) for name, policy in BOTH.items()}
            | {f"narrow-{name}": (policy, (KEYS, VALUES), False) for name, policy in (BOTH | APART).items()}
            | {"wide-clustered": (ALL, (VALUES, KEYS), False)}
        ).items()
    ],
)
def test_a_budget_for_all_tokens_equals_float64(policy, sizes, latent):
    heads = text(sizes, latent=latent)
    q, k, v = heads
    for _, at, found in run(policy, *heads, latent=latent):
        for row, position in enumerate(at):
            expected = attention(q[row, position], *(x[row, : position + 1] for x in (k, v)))
            np.testing.assert_allclose(
                found[row], expected, rtol=0, atol=tolerances.EXACT, err_msg=f"row {row}, position {position}"
            )


@pytest.mark.slow
def test_means_of_values_are_those_of_keys_that_hold_them():
    """RetroInfer's estimates: a latent layer's are those of one with values."""
    heads, policy = text((KEYS, VALUES), latent=True), RetroInfer(budget=64, window=24)
    for (one, at, found), (two, _, expected) in zip(run(policy, *heads, latent=True), run(policy, *heads), strict=True):
        np.testing.assert_array_equal(one.state.ids, two.state.ids)
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerances.EXACT, err_msg=f"positions {at}")
    assert one.state.index.value is None and two.state.index.value is not None


@pytest.mark.parametrize("options", [{}, pytest.param(dict(resident=True), marks=pytest.mark.slow)], ids=str)
def test_mla_matches_kv_layer_with_half_the_pool(options):
    heads = text((KEYS, VALUES), latent=True)
    policy = Clustered(budget=64, candidates=1, compact_every=32, value_fit=False, keys_first=False, **options)
    for (one, _, found), (two, at, expected) in zip(run(policy, *heads, latent=True), run(policy, *heads), strict=True):
        np.testing.assert_array_equal(one.state.ids, two.state.ids)
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerances.EXACT, err_msg=f"positions {at}")
    assert one.pool.shape[4] == 1 and 2 * one.pool.nbytes == two.pool.nbytes
    device = [[x for x in jax.tree.leaves(layer.state) if x.shape[-1] == VALUES] for layer in (one, two)]
    assert len(device[0]) == len(device[1]) - 3  # of sinks, window and digests
    assert [len(layer.state.held) for layer in (one, two)] == [1, 2]


@pytest.mark.slow
def test_of_a_latent_layer_what_keys_tell_of_values_is_known():
    """Of every token fetched nothing is left to a mean; of pages not fetched less is lost."""
    heads = text((KEYS, VALUES), latent=True)

    def error(**options) -> float:
        found = run(Clustered(budget=64, **options), *heads, latent=True)
        return np.mean([np.linalg.norm(x - y) for (_, _, x), (*_, y) in zip(found, run(ALL, *heads, latent=True), strict=True)])

    assert error() < tolerances.EXACT < 100 * error() < error(value_fit=False)
    assert error(candidates=1) < 0.9 * error(candidates=1, value_fit=False)


def test_a_plan_has_one_plane_for_a_latent_layer_and_explains_it(bundled):
    model, prompt = bundled[0], list(range(3, 200))
    plan = make_plan(model, Clustered(budget=64, dense_layers=3), batch_size=1, prompt_tokens=len(prompt), new_tokens=9)
    latent = replace(plan, spec=replace(plan.spec, latent=True))
    assert [each.pool_shape(3)[4:] for each in (plan, latent)] == [(n, 16, model.config.head_dim) for n in (2, 1)]
    expected, found = (attention_map._positions(model, prompt, each) for each in (plan, latent))
    np.testing.assert_array_equal(found[3], expected[3])
