"""Layers whose values and keys differ in size, and latent layers, whose values are the first channels of their keys."""

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
from tests.helpers.policies import KINDS

LENGTHS, NEW, STEPS = (250, 9, 100), (30, 7, 50), (36, 8)  # STEPS: before and after the new text; every 16th flushes a page
TOTAL = 350
KEYS, VALUES = 24, 16
ALL = Clustered(budget=TOTAL, compact_every=32)


def text(sizes: tuple[int, int], *, latent: bool = False):
    """Returns q, k, v [B, TOTAL, heads, channels] of one KV head."""
    (*heads, v), decoded = draw(LENGTHS, TOTAL - 256, kv_heads=1, sizes=sizes)
    q, k, v = (np.concatenate([x, y.swapaxes(0, 1)], axis=1) for x, y in zip((*heads, v), decoded, strict=True))
    return q, k, k[..., : sizes[1]] if latent else v


def run(policy, q, k, v, *, latent: bool = False):
    """Yields the layer, positions [B] and outputs [B, N, Hv]: of decoded tokens, a new text's last token, decoded tokens."""
    layer, positions = Layer(policy, LENGTHS, *(x[:, :256] for x in (q, k, v)), latent=latent), np.asarray(LENGTHS)

    def steps(count: int):
        for _ in range(count):
            yield (
                layer,
                positions.copy(),
                layer.step(*(np.stack([x[i, p] for i, p in enumerate(positions)]) for x in (q, k, v))),
            )
            positions[:] += 1

    yield from steps(STEPS[0])
    chunk = [np.full((len(LENGTHS), 256, *x.shape[2:]), np.nan, np.float32) for x in (q, k, v)]
    for x, part in zip((q, k, v), chunk, strict=True):
        for i, position in enumerate(positions):
            part[i, : NEW[i]] = x[i, position : position + NEW[i]]
    out = layer.extend(*chunk, NEW)
    positions += np.asarray(NEW)
    yield layer, positions - 1, np.stack([out[i, count - 1] for i, count in enumerate(NEW)])
    yield from steps(STEPS[1])


WITH_LATENT = dict(
    full=Full(), quest=Quest(budget=2 * TOTAL), clustered=ALL, pages=replace(ALL, budget=2 * TOTAL, rerank=False)
)
WITH_LATENT |= dict(topk=TopK(budget=TOTAL), ring=Ring(TOTAL))
NARROW_ONLY = dict(  # these store the values of latent layers separately
    streaming=Streaming(budget=TOTAL),
    snapkv=SnapKV(budget=TOTAL),
    expected=ExpectedAttention(budget=TOTAL),
    restkv=ReSTKV(budget=TOTAL),
)
BY_DEFAULT = ("latent-topk", "latent-quest", "narrow-snapkv")


@pytest.mark.parametrize(
    "policy, sizes, latent",
    [
        pytest.param(*case, id=name, marks=() if name in BY_DEFAULT else pytest.mark.slow)
        for name, case in (
            {f"latent-{row}": (row.exact(TOTAL), (KEYS, VALUES), True) for row in KINDS if row.exact is not None}
            | {f"latent-{name}": (policy, (KEYS, VALUES), True) for name, policy in WITH_LATENT.items()}
            | {f"narrow-{name}": (policy, (KEYS, VALUES), False) for name, policy in (WITH_LATENT | NARROW_ONLY).items()}
            | {"wide-clustered": (ALL, (VALUES, KEYS), False)}
        ).items()
    ],
)
def test_a_budget_for_all_tokens_equals_float64(policy, sizes, latent):
    heads = text(sizes, latent=latent)
    q, k, v = heads
    for _, positions, out in run(policy, *heads, latent=latent):
        for row, position in enumerate(positions):
            expected = attention(q[row, position], *(x[row, : position + 1] for x in (k, v)))
            np.testing.assert_allclose(
                out[row], expected, rtol=0, atol=tolerances.EXACT, err_msg=f"row {row}, position {position}"
            )


@pytest.mark.slow
def test_means_of_values_are_those_of_keys_that_hold_them():
    """RetroInfer estimates the same in a latent layer and in a layer that stores values."""
    heads, policy = text((KEYS, VALUES), latent=True), RetroInfer(budget=64, window=24)
    for (latent, positions, actual), (plain, _, expected) in zip(
        run(policy, *heads, latent=True), run(policy, *heads), strict=True
    ):
        np.testing.assert_array_equal(latent.state.ids, plain.state.ids)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerances.EXACT, err_msg=f"positions {positions}")
    assert latent.state.index.value is None and plain.state.index.value is not None


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, dict(resident=True)], ids=str)
def test_mla_matches_kv_layer_with_half_the_pool(options):
    heads = text((KEYS, VALUES), latent=True)
    policy = Clustered(budget=64, candidates=1, compact_every=32, value_fit=False, keys_first=False, **options)
    for (latent, _, actual), (plain, positions, expected) in zip(
        run(policy, *heads, latent=True), run(policy, *heads), strict=True
    ):
        np.testing.assert_array_equal(latent.state.ids, plain.state.ids)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerances.EXACT, err_msg=f"positions {positions}")
    assert latent.pool.shape[4] == 1 and 2 * latent.pool.nbytes == plain.pool.nbytes
    device = [[x for x in jax.tree.leaves(layer.state) if x.shape[-1] == VALUES] for layer in (latent, plain)]
    assert len(device[0]) == len(device[1]) - 3  # no values of sinks, window and digests
    assert [len(layer.state.held) for layer in (latent, plain)] == [1, 2]


@pytest.mark.slow
def test_of_a_latent_layer_what_keys_tell_of_values_is_known():
    """The value fit is exact for tokens of fetched pages; for pages that are not fetched it has less error."""
    heads = text((KEYS, VALUES), latent=True)

    def error(**options) -> float:
        steps = run(Clustered(budget=64, **options), *heads, latent=True)
        return np.mean([np.linalg.norm(x - y) for (_, _, x), (*_, y) in zip(steps, run(ALL, *heads, latent=True), strict=True)])

    assert error() < tolerances.EXACT < 100 * error() < error(value_fit=False)
    assert error(candidates=1) < 0.9 * error(candidates=1, value_fit=False)


def test_a_plan_has_one_plane_for_a_latent_layer_and_explains_it(bundled):
    model, prompt = bundled[0], list(range(3, 200))
    plan = make_plan(model, Clustered(budget=64, dense_layers=3), batch_size=1, prompt_tokens=len(prompt), new_tokens=9)
    latent = replace(plan, spec=replace(plan.spec, latent=True))
    assert [x.pool_shape(3)[4:] for x in (plan, latent)] == [(n, 16, model.config.head_dim) for n in (2, 1)]
    expected, actual = (attention_map._positions(model, prompt, x) for x in (plan, latent))
    np.testing.assert_array_equal(actual[3], expected[3])
