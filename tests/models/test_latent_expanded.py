"""Multi-head latent attention: prefill expands heads, caches keep one latent per token, and the logits are the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from bench.steps.sizes import fetched_bytes
from icejax.cache.registry import Clustered, Full
from icejax.checkpoint import load
from icejax.engine import prefill
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.extend import extend
from icejax.models.registry import family
from tests import tolerances
from tests.helpers import families
from tests.helpers.policies import OF_BASES
from tests.helpers.run import plan_for
from tests.models.test_published_configs import PUBLISHED

PROMPT, DECODED, EXTENDED = 133, 20, 40
TOTAL = PROMPT + 2 * DECODED + EXTENDED
HEAD_DIM = 32 + 8  # channels of a token's latent and of its rotated key


@pytest.fixture(scope="module")
def model_and_logits(tmp_path_factory):
    """Returns a model, and its logits [T, V] of a text by transformers, which expands all heads."""
    theirs = families.build(families.row("deepseek_v3-yarn"))
    with torch.no_grad():
        expected = theirs(torch.tensor([families.tokens(TOTAL)])).logits[0].numpy()
    return families.load(theirs, tmp_path_factory.mktemp("model")), expected


def logits(model, policy):
    """Yields positions and logits [V] of a text that is prefilled, decoded, extended and decoded again."""
    tokens, position = families.tokens(TOTAL), PROMPT
    plan = plan_for(model, policy, [tokens[:PROMPT]], 1000)
    decoding = DecodePrograms(model, plan)
    state, step, pool = prefill.prefill(model, [tokens[:PROMPT]], plan)
    for num_extended in (EXTENDED, 0):
        for token in tokens[position : position + DECODED]:
            yield position - 1, step.logits[0]
            state = dataclasses.replace(state, last_tokens=jnp.asarray([token], jnp.int32))
            state, step, pool = decoding.step(state, pool)
            position += 1
        if num_extended:
            state, step, pool = extend(model, tokens[position : position + num_extended], plan, state, pool)
            decoding.clock, position = 0, position + num_extended
    yield position - 1, step.logits[0]


def check_logits(model_and_logits, policy) -> None:
    model, expected = model_and_logits
    for position, actual in logits(model, policy):
        np.testing.assert_allclose(actual, expected[position], rtol=0, atol=tolerances.LOGITS, err_msg=f"position {position}")


@pytest.mark.slow
def test_decoding_the_latent_equals_expanded_heads(model_and_logits):
    check_logits(model_and_logits, Clustered(budget=TOTAL, compact_every=32))


@pytest.mark.slow
@pytest.mark.parametrize("row", OF_BASES, ids=str)
def test_caches_keep_latents(model_and_logits, row):
    """With a budget for all tokens, logits are those of expanded heads; test_latent_layers tests a layer with every policy."""
    check_logits(model_and_logits, row.exact(TOTAL))


@pytest.mark.slow
def test_pages_hold_the_key_alone(model_and_logits):
    """The pool, the sinks and window, and a cache of all tokens on the device hold one latent head per token and no values."""
    model = model_and_logits[0]
    plan = plan_for(model, Clustered(dense_layers=0), [families.tokens(PROMPT)], 1000)
    state, _, pool = prefill.prefill(model, [families.tokens(PROMPT)], plan)
    assert plan.pool_shape(1)[3:] == (1, 1, 16, HEAD_DIM) and pool.shape[3:] == (1, 1, 16, HEAD_DIM)
    assert fetched_bytes(plan) == 16 * HEAD_DIM * 4
    assert all(len(layer.window.sinks) == 1 for layer in state.cache.layers)
    full = jax.tree.leaves(jax.eval_shape(lambda: Full().init(plan.spec)))
    assert [x.shape for x in full] == [(1, plan.spec.capacity, HEAD_DIM)]


@pytest.mark.parametrize("page_dtype, size", [(None, 16 * 576 * 2), ("int8", 18 * 576)])
def test_a_page_of_a_published_model_is_that_of_one_key(page_dtype, size):
    raw = PUBLISHED["DeepSeek-V2-Lite"][0]
    graph, parameters, tree = load.abstract(family(raw).read_config(raw), "bfloat16")
    model = nnx.merge(graph, jax.tree.unflatten(tree, list(parameters.values())))
    plan = plan_for(model, Clustered(page_dtype=page_dtype), [[0] * 1000], 10)
    assert fetched_bytes(plan) == size


@pytest.mark.slow
def test_heads_are_rotated_to_the_positions_of_their_making(model_and_logits):
    layer = model_and_logits[0].model.layers[1]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 64)), jnp.float32)
    positions, shifts = np.arange(5)[None] + [[3], [90]], np.asarray([[7] * 5, [-60] * 5])
    seen = jnp.asarray([500, 500])

    def heads(head_positions):
        return layer.enter(x, jnp.asarray(head_positions, jnp.int32), seen)

    for actual, expected in zip(heads(positions)[:2], heads(positions + shifts)[:2], strict=True):
        np.testing.assert_allclose(layer.rerotate(actual, jnp.asarray(shifts), seen), expected, rtol=0, atol=tolerances.EXACT)


@pytest.mark.slow
def test_every_number_of_the_latent_is_read(model_and_logits):
    """Changing a field changes a layer's keys, or the parameters that a checkpoint must have."""
    config = model_and_logits[0].config

    def shapes(latent):
        changed = dataclasses.replace(config, latent=latent)
        return {key: leaf.shape for key, leaf in load.abstract(changed, "float32")[1].items()}

    shape_changes = dict(kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=8, v_head_dim=8)
    assert shape_changes.keys() == {field.name for field in dataclasses.fields(config.latent)}
    for field, value in shape_changes.items():
        assert shapes(dataclasses.replace(config.latent, **{field: value})) != shapes(config.latent), field
    not_interleaved = dataclasses.replace(config, rope_interleave=False)
    x, position = jnp.ones((1, 1, 64)).at[0, 0, ::3].set(2.0), jnp.asarray([[9]])
    keys = []
    for changed in (config, not_interleaved):
        graph, _, tree = load.abstract(changed, "float32")
        layer = nnx.merge(graph, jax.tree.unflatten(tree, jax.tree.leaves(model_and_logits[0]))).model.layers[1]
        keys.append(layer.enter(x, position, position[0] + 1).k)
    assert np.abs(keys[0] - keys[1]).max() > 1e-3
