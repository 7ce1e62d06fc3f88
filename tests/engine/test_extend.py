"""Extending a cache: new tokens attend exactly to all tokens before them, and decoding continues as after one long prompt."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icejax.cache.registry import Clustered, Full
from icejax.engine import extend, prefill
from icejax.engine.buckets import bucket, text_bucket
from icejax.engine.decode.step import DecodePrograms
from tests import tolerances
from tests.helpers import families
from tests.helpers.run import all_logits, greedy, plan_for

# The budgets hold all tokens; with less, tokens decoded between the parts would be approximated.
POLICIES = {
    "full": Full(),
    "pages-of-16": Clustered(budget=2000, sinks=8, window=24, compact_every=32),
    "pages-of-8": Clustered(budget=2000, page_size=8, sinks=2, window=9, digest_dtype="int8"),
}
LONG, SHORT = [200, 60, 300], [5, 9, 40]
CASES = {
    "short-full": ("llama-gqa", SHORT, "full"),
    "windows": ("mistral-window", [30, 1, 400, 3], "full"),  # sliding layers have no pages
    "short-pages-of-16": ("llama-gqa", SHORT, "pages-of-16"),
    "short-pages-of-8": ("llama-gqa", SHORT, "pages-of-8"),
    "long-full": ("llama-gqa", LONG, "full"),
    "long-pages-of-16": ("llama-gqa", LONG, "pages-of-16"),
    "long-pages-of-8": ("llama-gqa", LONG, "pages-of-8"),
}
NOT_SLOW = ("short-full", "windows")


@pytest.mark.parametrize("case", [pytest.param(x, marks=() if x in NOT_SLOW else pytest.mark.slow) for x in CASES])
def test_logits_in_parts_equal_those_of_the_whole(tmp_path, case):
    """Between the parts, tokens of the text are decoded, so that each part meets the window in another state."""
    family, parts, cache = CASES[case]
    model = families.load(families.build(families.row(family)), tmp_path)
    tokens = families.tokens(sum(parts) + 20 * len(parts))
    plan = plan_for(model, POLICIES[cache], [tokens], 1500)
    decoding = DecodePrograms(model, plan)
    expected = all_logits(model, tokens, Full())
    state, pool, position = None, None, 0
    for number, part in enumerate(parts):
        if state is None:
            state, step, pool = prefill.prefill(model, [tokens[:part]], plan)
        else:
            assert plan.room_for_answer(part, pages=int(state.cache.lengths.next_page)) > 0
            state, step, pool = extend.extend(model, tokens[position : position + part], plan, state, pool)
        position += part
        np.testing.assert_allclose(step.logits[0], expected[position - 1], rtol=0, atol=tolerances.LOGITS)
        decoding.clock = 0
        for token in tokens[position : position + 7 * number + 3]:
            forced = jnp.asarray([token], jnp.int32)
            state = dataclasses.replace(state, last_tokens=forced)
            state, _, pool = decoding.step(state, pool)
            position += 1
        assert int(state.cache.lengths.seen[0]) == position


@pytest.mark.slow
@pytest.mark.parametrize("reuse", [1, 2])
def test_what_is_generated_behind_parts_equals_the_whole(tmp_path, reuse):
    model = families.load(families.build(families.row("llama-gqa")), tmp_path)
    tokens, policy = families.tokens(500), Clustered(budget=2000, reuse=reuse)
    plan = plan_for(model, policy, [tokens], 1000)
    state, step, pool = prefill.prefill(model, [tokens[:300]], plan)
    state, step, pool = extend.extend(model, tokens[300:], plan, state, pool)
    decoding, token_ids = DecodePrograms(model, plan), [int(step.tokens[0])]
    for _ in range(40):
        state, step, pool = decoding.step(state, pool)
        token_ids.append(int(step.tokens[0]))
    np.testing.assert_array_equal(token_ids, greedy(model, Full(), [tokens], 41)[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Full(), Clustered(budget=64)], ids=["full", "clustered"])
def test_a_text_costs_the_same_in_a_longer_context(tmp_path, policy):
    """One layer's program for 14 tokens, compiled for two context lengths; its loops over cached tokens count once."""
    model, costs = families.load(families.build(families.row("llama-gqa")), tmp_path), []
    for new_tokens in (700, 6000):
        plan = plan_for(model, policy, [families.tokens(100)], new_tokens)
        state, _, pool = prefill.prefill(model, [families.tokens(100)], plan)
        x, table = jnp.zeros((1, 16, model.config.hidden_size)), state.cache.table
        parts = (state.cache.lengths, jnp.asarray([14], jnp.int32), state.cache.layers[0], plan.pages(0, pool, table), None)
        kind = dict(policy=plan.policies[0], spec=plan.spec_of(0))
        program = extend._extend_layer.lower(model.model.layers[0], x, *parts, **kind).compile()
        costs.append(program.cost_analysis()["flops"])
    assert costs[1] <= 1.02 * costs[0]


@given(st.integers(1, 2_000_000))
def test_padded_texts_hold_their_tokens_in_few_sizes(tokens):
    size = text_bucket(tokens)
    assert tokens <= size <= max(16, 2 * tokens) and size % 16 == 0
    assert size == bucket(tokens) or tokens <= 128
