"""Mixture of experts: routers choose the same experts as transformers, and every form of the products equals a plain loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icejax.checkpoint import load
from icejax.config import ExpertForm, Experts
from icejax.models.parts.experts import Router
from icejax.ops.experts import mixture
from icejax.ops.quantized.products import Grouped
from tests import tolerances
from tests.helpers import families

COUNT, CHOSEN, HIDDEN, INNER = 8, 3, 24, 20
MIXTURES = [
    row  # without Gemma 4, whose router has inputs of its own: test_parity covers it
    for row in families.FAMILIES
    if {"num_local_experts", "num_experts", "n_routed_experts"} & dict(row.changes).keys()
    and "enable_moe_block" not in dict(row.changes)
]
QUANTISED_FORMS = mixture.by_sum, mixture.one_by_one, mixture.in_blocks
LIMITED = ExpertForm(limit=0.8, alpha=1.3, biased=True)


def stack(rng) -> mixture.ExpertWeights:
    shapes = (COUNT, INNER, HIDDEN), (COUNT, INNER, HIDDEN), (COUNT, HIDDEN, INNER)
    return mixture.ExpertWeights(*(rng.standard_normal(shape).astype(np.float32) * shape[-1] ** -0.5 for shape in shapes))


def plain(x, weights: mixture.ExpertWeights, ids, form: ExpertForm = mixture.PLAIN) -> np.ndarray:
    """Returns each expert's output f64[T, k, D] from a float64 loop over tokens and their experts."""
    out = np.zeros((*ids.shape, HIDDEN))
    for t, k in np.ndindex(ids.shape):
        gate, up, down = (matrices[ids[t, k]].astype(np.float64) for matrices in weights[:3])
        biases = [0 if bias is None else bias[ids[t, k]] for bias in weights[3:]]
        gate, up = gate @ x[t] + biases[0], up @ x[t] + biases[1]
        if form.limit is not None:
            gate, up = np.minimum(gate, form.limit), np.clip(up, -form.limit, form.limit) + 1
        out[t, k] = down @ (gate / (1 + np.exp(-form.alpha * gate)) * up) + biases[2]
    return out


def drawn(rng, tokens: int, skew: float) -> np.ndarray:
    """Returns expert ids [T, k], different for each token; a large skew gives most tokens the same experts."""
    scores = rng.standard_normal((tokens, COUNT)) + skew * np.arange(COUNT)
    return np.argsort(-scores, axis=1)[:, :CHOSEN].astype(np.int32)


@pytest.mark.parametrize("form", [*QUANTISED_FORMS, mixture.by_all], ids=lambda form: form.__name__)
@pytest.mark.parametrize("tokens", [1, 8, 300])
@pytest.mark.parametrize("skew", [0.0, 20.0])
def test_every_form_is_a_plain_loop(form, tokens, skew):
    rng = np.random.default_rng(tokens)
    weights, ids = stack(rng), drawn(rng, tokens, skew)
    x = rng.standard_normal((tokens, HIDDEN)).astype(np.float32)
    actual = jax.jit(form)(x, jax.tree.map(jnp.asarray, weights), ids)
    np.testing.assert_allclose(actual, plain(x, weights, ids), rtol=0, atol=tolerances.EXACT)


@pytest.mark.parametrize("form", QUANTISED_FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("tokens", [3, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["int4", *(pytest.param(k, marks=pytest.mark.slow) for k in ("int8", "float4_e2m1fn"))])
def test_every_form_takes_codes(form, tokens, kind):
    rng, quantised, dequantised = np.random.default_rng(tokens), [], []
    for rows, columns in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)):
        shape = (COUNT, columns // 4, rows)
        codes = (rng.standard_normal((*shape, 4)) * 3).clip(-6, 6).astype(kind)
        scale, zero = rng.uniform(0.05, 0.1, shape).astype(np.float32), rng.integers(-4, 4, shape).astype(np.int8)
        quantised.append(Grouped(jnp.asarray(codes), jnp.asarray(scale), jnp.asarray(zero)))
        groups = (codes.astype(np.float64) - zero[..., None]) * scale[..., None]
        dequantised.append(groups.swapaxes(1, 2).reshape(COUNT, rows, columns))
    ids, x = drawn(rng, tokens, 0.0), rng.standard_normal((tokens, HIDDEN)).astype(np.float32)
    actual, expected = (
        jax.jit(form)(x, mixture.ExpertWeights(*quantised), ids),
        plain(x, mixture.ExpertWeights(*dequantised), ids),
    )
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerances.EXACT * np.abs(expected).max())


@pytest.mark.parametrize("form", [*QUANTISED_FORMS, mixture.by_all], ids=lambda form: form.__name__)
def test_every_form_takes_biases_and_limits(form):
    rng = np.random.default_rng(2)
    biases = (rng.standard_normal((COUNT, size)).astype(np.float32) for size in (INNER, INNER, HIDDEN))
    weights, ids = mixture.ExpertWeights(*stack(rng)[:3], *biases), drawn(rng, 20, 1.0)
    x = rng.standard_normal((20, HIDDEN)).astype(np.float32)
    actual = jax.jit(functools.partial(form, form=LIMITED))(x, jax.tree.map(jnp.asarray, weights), ids)
    np.testing.assert_allclose(actual, plain(x, weights, ids, LIMITED), rtol=0, atol=tolerances.EXACT)


@pytest.mark.parametrize("tokens", [mixture.FEW, mixture.FEW + 1])
def test_weights_are_those_of_the_experts(tokens):
    rng = np.random.default_rng(7)
    weights, ids = stack(rng), drawn(rng, tokens, 0.0)
    x, shares = (rng.standard_normal((tokens, n)).astype(np.float32) for n in (HIDDEN, CHOSEN))
    actual = jax.jit(mixture.mix_experts)(x, jax.tree.map(jnp.asarray, weights), ids, shares)
    expected = (plain(x, weights, ids) * shares[..., None]).sum(1)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerances.EXACT)


@pytest.mark.parametrize("form", [mixture.in_blocks, mixture.by_all], ids=lambda form: form.__name__)
def test_what_a_token_holds_stays_with_it(form):
    """A token of NaN, as padding may hold, changes the output of no other token."""
    rng = np.random.default_rng(9)
    weights, ids = stack(rng), drawn(rng, 40, 0.0)
    x = rng.standard_normal((40, HIDDEN)).astype(np.float32)
    expected = plain(x, weights, ids)
    x[11] = np.nan
    actual = np.asarray(jax.jit(form)(x, jax.tree.map(jnp.asarray, weights), ids))
    other_tokens = np.arange(40) != 11
    assert np.isnan(actual[11]).all()
    np.testing.assert_allclose(actual[other_tokens], expected[other_tokens], rtol=0, atol=tolerances.EXACT)


def by_id(ids_and_weights: tuple[np.ndarray, np.ndarray]) -> list[np.ndarray]:
    """Returns ids and weights sorted by id: transformers returns a token's experts in no fixed order."""
    return [np.take_along_axis(x, np.argsort(ids_and_weights[0], axis=1), axis=1) for x in ids_and_weights]


@pytest.mark.parametrize("scale", [pytest.param("default", marks=pytest.mark.slow), "fan_in"])
@pytest.mark.parametrize("row", MIXTURES, ids=str)
def test_tokens_take_the_experts_of_transformers(row, scale, tmp_path):
    import torch

    theirs = families.build(row, scale)
    ours = families.load(theirs, tmp_path)
    x = np.random.default_rng(3).standard_normal((200, families.SIZES["hidden_size"])).astype(np.float32)
    sparse = [i for i, layer in enumerate(ours.config.layers) if layer.experts is not None]
    assert sparse
    for i in sparse:
        mlp, outputs = theirs.model.layers[i].mlp, []
        hook = (mlp.gate if hasattr(mlp, "gate") else mlp.router).register_forward_hook(
            lambda module, inputs, out, outputs=outputs: outputs.append(out)
        )
        with torch.no_grad():
            mlp(torch.tensor(x)[None])
        hook.remove()
        ((_, weights, ids),) = outputs
        actual = jax.jit(lambda router, x: router(x))(ours.model.layers[i].mlp.gate, x)
        actual, expected = (np.asarray(actual[0]), np.asarray(actual[1])), (ids.numpy(), weights.numpy())
        (ours_by_id, our_weights), (theirs_by_id, their_weights) = map(by_id, (actual, expected))
        np.testing.assert_array_equal(ours_by_id, theirs_by_id)
        np.testing.assert_allclose(our_weights, their_weights, rtol=0, atol=tolerances.EXACT)


def test_every_number_of_the_experts_is_read(tmp_path):
    """Changing a field changes the router's output, or the shapes of the parameters that a checkpoint must have."""
    model = families.load(families.build(families.row("glm4_moe-groups"), num_hidden_layers=1), tmp_path)
    router, experts = model.model.layers[0].mlp.gate, model.config.experts
    x = np.random.default_rng(3).standard_normal((200, families.SIZES["hidden_size"])).astype(np.float32)

    def route(variant: Experts) -> np.ndarray:
        varied_router = Router(x.shape[1], variant, dtype="float32")
        varied_router.weight[...], varied_router.e_score_correction_bias[...] = (
            router.weight[...],
            router.e_score_correction_bias[...],
        )
        return np.concatenate(jax.jit(lambda router, x: router(x))(varied_router, x), axis=1)

    def shapes(config):
        return {key: leaf.shape for key, leaf in load.abstract(config, "float32")[1].items()}

    routing_changes = dict(score="softmax", groups=2, chosen_groups=4, group_best=1, normalised=False, factor=1.0)
    assert {*routing_changes, "choice_bias", "biased", "per_expert_scale"} == {
        field.name for field in dataclasses.fields(experts.routing)
    }
    for field, value in routing_changes.items():
        variant = dataclasses.replace(experts, routing=dataclasses.replace(experts.routing, **{field: value}))
        assert np.abs(route(variant) - route(experts)).max() > 1e-3, field
    shape_changes = dict(count=16, size=24, shared=8, shared_gated=True)
    shape_changes["routing"] = dataclasses.replace(experts.routing, choice_bias=False, biased=True)
    shape_changes["form"] = LIMITED
    assert {*shape_changes, "chosen", "beside"} == {field.name for field in dataclasses.fields(experts)}
    assert route(dataclasses.replace(experts, chosen=2)).shape != route(experts).shape
    for field, value in shape_changes.items():
        config = dataclasses.replace(model.config, experts=dataclasses.replace(experts, **{field: value}))
        assert shapes(config) != shapes(model.config), field
    assert shapes(dataclasses.replace(model.config, dense_layers=(0,))) != shapes(model.config)
