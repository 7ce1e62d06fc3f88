"""A trimmed cache continues as if the forgotten tokens had never been in it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from icejax.cache.registry import Clustered, Coded, Full, OmniKV, Packed, Quest, SnapKV
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.extend import extend
from icejax.engine.prefill import prefill
from icejax.engine.trim import fits, joint_of, last_joint, trim
from tests import tolerances
from tests.helpers import families
from tests.helpers.run import all_logits, plan_for

ROOM, PAGE = 2000, 8
POLICIES = {
    "full": Full(),
    "clustered": Clustered(budget=ROOM, page_size=PAGE, compact_every=32),
    "resident": Clustered(budget=ROOM, page_size=PAGE, compact_every=32, resident=True),
    "coded": Coded(budget=ROOM, page_size=PAGE, compact_every=32),
    "packed": Packed(budget=ROOM, page_size=PAGE, compact_every=32),
    "quest": Quest(budget=ROOM, page_size=PAGE),
    "omnikv": OmniKV(budget=ROOM, generated=16, every=2, wait=0),
}
FIRST, WRONG, SAME = 150, 60, 170  # tokens of the first text, of the text to forget, and in common with the right text


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return families.load(families.build(families.row("llama-gqa")), tmp_path_factory.mktemp("model"))


def decoded(decoding, state, pool, tokens):
    """Returns the state after forced tokens, the logits of the last one, and the pool."""
    for token in tokens:
        state = dataclasses.replace(state, last_tokens=jnp.asarray([token], jnp.int32))
        state, step, pool = decoding.step(state, pool)
    return state, step, pool


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_trimmed_cache_equals_one_without_the_forgotten_tokens(model, name):
    """20 tokens are decoded behind the first text, then another text and 45 tokens: pages leave the window, and are compacted."""
    policy, right, wrong = POLICIES[name], families.tokens(400), families.tokens(WRONG + 45, seed=7)
    plan = plan_for(model, policy, [right], 1500)
    state, _, pool = prefill(model, [right[:FIRST]], plan)
    joints = [joint_of(plan, state.cache)]
    state, _, pool = decoded(DecodePrograms(model, plan), state, pool, right[FIRST:SAME])
    joints.append(joint_of(plan, state.cache))
    state, _, pool = extend(model, wrong[:WRONG], plan, state, pool)
    joints.append(joint_of(plan, state.cache))
    state, _, pool = decoded(DecodePrograms(model, plan), state, pool, wrong[WRONG:])
    assert not plan.pooled or all(fits(plan, state.cache, joint) for joint in joints)
    joint = last_joint(plan, joints, same=SAME, seen=SAME + len(wrong))
    assert SAME - 2 * 32 < joint.tokens <= SAME and (plan.pooled or joint.tokens == SAME)
    state, step, pool = extend(model, right[joint.tokens : 300], plan, trim(state, plan, joint), pool)
    expected = all_logits(model, right, Full())
    np.testing.assert_allclose(step.logits[0], expected[299], rtol=0, atol=tolerances.LOGITS)
    state, step, pool = decoded(DecodePrograms(model, plan), state, pool, right[300:350])
    np.testing.assert_allclose(step.logits[0], expected[349], rtol=0, atol=tolerances.LOGITS)
    assert int(state.cache.lengths.seen[0]) == 350


def test_a_cache_that_has_lost_tokens_cannot_be_trimmed(model, tmp_path):
    """SnapKV has evicted tokens; a sliding window of 20 has lost those before it."""
    sliding = families.load(families.build(families.row("mistral-window")), tmp_path)
    for model_, policy, seen in ((model, SnapKV(budget=64), 100), (sliding, Full(), 100)):
        plan = plan_for(model_, policy, [families.tokens(100)], 100)
        assert last_joint(plan, [], same=50, seen=seen) is None
    assert last_joint(plan, [], same=5, seen=8).tokens == 5


@pytest.mark.slow
def test_a_short_text_behind_a_trimmed_cache_has_its_joint(model):
    """3 tokens do not fill the window: the cache can end where it was trimmed, and not at a token before."""
    right, policy = families.tokens(400), POLICIES["clustered"]
    plan = plan_for(model, policy, [right], 1500)
    state, _, pool = prefill(model, [right[:FIRST]], plan)
    joint = joint_of(plan, state.cache)
    state, _, pool = extend(model, families.tokens(WRONG, seed=7), plan, state, pool)
    state, _, pool = extend(model, right[joint.tokens : joint.tokens + 3], plan, trim(state, plan, joint), pool)
    assert joint_of(plan, state.cache) == joint and fits(plan, state.cache, joint)


@pytest.mark.slow
def test_a_short_first_text_has_no_joint(model):
    """Its sinks are not full, and later tokens are in pages: the mask of the sinks could not tell."""
    plan = plan_for(model, POLICIES["clustered"], [families.tokens(20)], 100)
    state, _, pool = prefill(model, [families.tokens(20)], plan)
    assert joint_of(plan, state.cache) is None
    state, _, _ = decoded(DecodePrograms(model, plan), state, pool, families.tokens(60))
    assert joint_of(plan, state.cache) is None and last_joint(plan, [], same=79, seen=80) is None
