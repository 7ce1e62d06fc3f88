"""A cache that has moved to pages is the one that a prefill of the same tokens leaves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icejax.cache.registry import Clustered, Full
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.extend import extend
from icejax.engine.move import move
from icejax.engine.plan import make_plan
from icejax.engine.prefill import pool_for, prefill
from tests import tolerances
from tests.helpers import families

CLUSTERED = Clustered(budget=64)


def plans(model, *, tokens, policy=CLUSTERED, room=600, context_length=1200):
    """Returns the plan of a session that begins with a full cache, and of the pages that it moves to."""
    before = make_plan(model, Full(movable=True), batch_size=1, prompt_tokens=300, new_tokens=room - 300, extends=True)
    sizes = dict(batch_size=1, prompt_tokens=tokens, new_tokens=context_length - tokens, extends=True)
    return before, make_plan(model, policy, **sizes)


def moved(model, state, before, after, tokens):
    states = list(state.cache.layers)
    cache, pool = move(model, states, tokens, before, after, pool_for([tokens], after, None))
    assert states == [None] * len(states)
    return cache, pool


def assert_same(cache, expected, compare):
    assert jax.tree.structure(cache) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree.leaves_with_path(cache), jax.tree.leaves(expected), strict=True):
        compare(np.asarray(x), np.asarray(y), err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-window", "deepseek_v2-lite"])
def test_a_moved_prompt_has_the_state_of_a_prefill(name, tmp_path):
    """Bit for bit, with channels of unlike size, whose factors come from the queries of all tokens."""
    reference, text = families.build(families.row(name)), families.tokens(300)
    if name == "llama-gqa":
        for layer in reference.model.layers:
            layer.self_attn.k_proj.weight.data[5::16] *= 40
    model = families.load(reference, tmp_path)
    before, after = plans(model, tokens=len(text))
    state, _, _ = prefill(model, [text], before)
    expected, _, pages = prefill(model, [text], after)
    cache, pool = moved(model, state, before, after, len(text))
    assert name != "llama-gqa" or 0 < (np.asarray(cache.layers[0].factors) != 1).mean() < 0.3
    assert_same(cache, expected.cache, np.testing.assert_array_equal)
    np.testing.assert_array_equal(pool, pages)


@pytest.mark.slow
@pytest.mark.parametrize("held", [340, 331])
def test_decoded_and_extended_tokens_move_too(bundled, held):
    """The tokens of a prompt, of steps and of a later text; the last ones may be left out."""
    model, text, new = bundled[0], families.tokens(280), 40
    before, after = plans(model, tokens=held)
    state, step, _ = prefill(model, [text], before)
    decoding = DecodePrograms(model, before)
    for _ in range(20):
        text.append(int(step.tokens[0]))
        state, step, _ = decoding.step(state, None)
    later = families.tokens(new, seed=1)
    state, _, _ = extend(model, later, before, state, None)
    text = [*text, *later][:held]
    expected, _, _ = prefill(model, [text], after)
    cache, pool = moved(model, state, before, after, held)
    for layer, other in zip(cache.layers, expected.cache.layers, strict=True):
        if held == 340:  # tokens that are left out count in the squares of queries
            np.testing.assert_array_equal(layer.factors, other.factors)
        for x, y in zip((*layer.window.sinks, *layer.window.newest), (*other.window.sinks, *other.window.newest), strict=True):
            np.testing.assert_allclose(x, y, atol=tolerances.LOGITS)
        np.testing.assert_array_equal(layer.index.levels[0].count, other.index.levels[0].count)
    question = list(b"def f(x):")
    logits = []
    for layers, one_pool in ((cache, pool), (expected.cache, prefill(model, [text], after)[2])):
        row = dataclasses.replace(jax.tree.map(jnp.copy, expected), cache=jax.tree.map(jnp.copy, layers))
        logits.append(np.asarray(extend(model, question, after, row, one_pool)[1].logits))
    np.testing.assert_allclose(*logits, atol=tolerances.LOGITS)


@pytest.mark.slow
def test_the_squares_of_queries_are_those_of_the_text(bundled):
    """Decode and extend add what a prefill of the whole text sums."""
    model, text = bundled[0], families.tokens(90)
    plan = make_plan(model, Full(movable=True), batch_size=1, prompt_tokens=100, new_tokens=100, extends=True)
    state, step, _ = prefill(model, [text[:60]], plan)
    decoding = DecodePrograms(model, plan)
    for token in text[60:70]:
        state = dataclasses.replace(state, last_tokens=jnp.asarray([token], jnp.int32))
        state, step, _ = decoding.step(state, None)
    state, _, _ = extend(model, text[70:], plan, state, None)
    expected, _, _ = prefill(model, [text], plan)
    for layer, other in zip(state.cache.layers, expected.cache.layers, strict=True):
        np.testing.assert_allclose(layer.squares, other.squares, rtol=tolerances.LOGITS)
        assert (np.asarray(other.squares) > 0).all()
