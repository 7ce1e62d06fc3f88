"""Multi-head latent attention: a text attends with heads of its own, a cache keeps one latent, and both say the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from bench.sizes import fetched_bytes
from icejax.cache.registry import Clustered, Full
from icejax.checkpoint import load
from icejax.engine import prefill
from icejax.engine.decode_step import DecodePrograms
from icejax.engine.extend import extend
from icejax.models.registry import family
from tests import tolerances
from tests.helpers import families
from tests.helpers.policies import OF_BASES
from tests.helpers.run import plan_for
from tests.models.test_published_configs import PUBLISHED

PROMPT, DECODED, EXTENDED = 133, 20, 40
TOTAL = PROMPT + 2 * DECODED + EXTENDED
HEAD = 32 + 8  # channels of what is kept of a token


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A model and its logits [T, V] of a text, by transformers, which expands all heads."""
    theirs = families.build(families.row("deepseek_v3-yarn"))
    with torch.no_grad():
        expected = theirs(torch.tensor([families.tokens(TOTAL)])).logits[0].numpy()
    return families.load(theirs, tmp_path_factory.mktemp("model")), expected


def logits(model, policy):
    """Yields positions and logits [V] of a text that is decoded, taken at once and decoded again."""
    tokens, at = families.tokens(TOTAL), PROMPT
    plan = plan_for(model, policy, [tokens[:PROMPT]], 1000)
    decoding = DecodePrograms(model, plan)
    state, step, pool = prefill.prefill(model, [tokens[:PROMPT]], plan)
    for more in (EXTENDED, 0):
        for token in tokens[at : at + DECODED]:
            yield at - 1, step.logits[0]
            state = dataclasses.replace(state, last_tokens=jnp.asarray([token], jnp.int32))
            state, step, pool = decoding.step(state, pool)
            at += 1
        if more:
            state, step, pool = extend(model, tokens[at : at + more], plan, state, pool)
            decoding.clock, at = 0, at + more
    yield at - 1, step.logits[0]


def check(both, policy) -> None:
    model, expected = both
    for at, found in logits(model, policy):
        np.testing.assert_allclose(found, expected[at], rtol=0, atol=tolerances.LOGITS, err_msg=f"position {at}")


@pytest.mark.slow
def test_decoding_the_latent_equals_expanded_heads(both):
    check(both, Clustered(budget=TOTAL, compact_every=32))


@pytest.mark.slow
@pytest.mark.parametrize("row", OF_BASES, ids=str)
def test_caches_keep_latents(both, row):
    """With room for all tokens logits are those of expanded heads; a single layer does so with every policy (test_latent)."""
    check(both, row.exact(TOTAL))


def test_pages_hold_the_key_alone(both):
    """What is kept has the bytes of one latent head, in the pool, of sinks and window, and where all tokens stay on the device."""
    model = both[0]
    plan = plan_for(model, Clustered(dense_layers=0), [families.tokens(PROMPT)], 1000)
    state, _, pool = prefill.prefill(model, [families.tokens(PROMPT)], plan)
    assert plan.pool_shape(1)[3:] == (1, 1, 16, HEAD) and pool.shape[3:] == (1, 1, 16, HEAD)
    assert fetched_bytes(plan) == 16 * HEAD * 4
    assert all(len(layer.window.sinks) == 1 for layer in state.cache.layers)
    full = jax.tree.leaves(jax.eval_shape(lambda: Full().init(plan.spec)))
    assert [x.shape for x in full] == [(1, plan.spec.capacity, HEAD)]


@pytest.mark.parametrize("page_dtype, size", [(None, 16 * 576 * 2), ("int8", 18 * 576)])
def test_a_page_of_a_published_model_is_that_of_one_key(page_dtype, size):
    raw = PUBLISHED["DeepSeek-V2-Lite"][0]
    graph, parameters, tree = load.abstract(family(raw).read_config(raw), "bfloat16")
    model = nnx.merge(graph, jax.tree.unflatten(tree, list(parameters.values())))
    plan = plan_for(model, Clustered(page_dtype=page_dtype), [[0] * 1000], 10)
    assert fetched_bytes(plan) == size


def test_heads_are_rotated_to_the_positions_of_their_making(both):
    layer = both[0].model.layers[1]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 64)), jnp.float32)
    positions, by = np.arange(5)[None] + [[3], [90]], np.asarray([[7] * 5, [-60] * 5])
    seen = jnp.asarray([500, 500])

    def heads(at):
        return layer.enter(x, jnp.asarray(at, jnp.int32), seen)

    for found, expected in zip(heads(positions)[:2], heads(positions + by)[:2], strict=True):
        np.testing.assert_allclose(layer.rerotate(found, jnp.asarray(by)), expected, rtol=0, atol=tolerances.EXACT)


def test_every_number_of_the_latent_is_read(both):
    """Each field changes what a layer makes of tokens, or the parameters that a checkpoint must have."""
    config = both[0].config

    def shapes(latent):
        changed = dataclasses.replace(config, latent=latent)
        return {key: leaf.shape for key, leaf in load.abstract(changed, "float32")[1].items()}

    of_shape = dict(kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=8, v_head_dim=8)
    assert of_shape.keys() == {field.name for field in dataclasses.fields(config.latent)}
    for field, value in of_shape.items():
        assert shapes(dataclasses.replace(config.latent, **{field: value})) != shapes(config.latent), field
    plain = dataclasses.replace(config, rope_interleave=False)
    x, at = jnp.ones((1, 1, 64)).at[0, 0, ::3].set(2.0), jnp.asarray([[9]])
    made = []
    for changed in (config, plain):
        graph, _, tree = load.abstract(changed, "float32")
        layer = nnx.merge(graph, jax.tree.unflatten(tree, jax.tree.leaves(both[0]))).model.layers[1]
        made.append(layer.enter(x, at, at[0] + 1).k)
    assert np.abs(made[0] - made[1]).max() > 1e-3
