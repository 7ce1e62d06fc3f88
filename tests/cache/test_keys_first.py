"""The option `keys_first`: where pages' keys are fetched before the best tokens' values, and how much crosses the bus."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.steps.sizes import fetched_per_step
from icejax.cache.options import make_policy
from icejax.cache.registry import Clustered, Coded, Tolerant, name_of
from icejax.checks.errors import InputError
from icejax.engine.plan import make_plan
from icejax.ops.attention.dense import Attended, Scoring
from icejax.ops.pages.digests import digest
from icejax.ops.pages.ranked_attention import rank_tokens
from tests import tolerances
from tests.helpers.layer import Layer, draw
from tests.helpers.run import jitted


@pytest.mark.parametrize(
    ("options", "platform", "latent", "expected"),
    [
        ({}, "cpu", False, True),
        ({}, "gpu", False, True),
        ({}, "tpu", False, False),  # TPU reads host memory in tiles of several rows
        ({}, "cpu", True, False),  # latent keys hold the values
        (dict(page_dtype="int8"), "cpu", False, False),
        (dict(resident=True), "cpu", False, False),
        (dict(tail=False), "cpu", False, False),
        (dict(rerank=False), "cpu", False, False),
        (dict(keys_first=False), "cpu", False, False),
        (dict(keys_first=True), "tpu", False, True),  # make_plan refuses it
    ],
    ids=str,
)
def test_keys_come_first_where_that_can_be(options, platform, latent, expected):
    assert Clustered(**options).for_platform(platform, latent=latent).keys_first is expected


@pytest.mark.parametrize("policy", [Tolerant(), Coded()], ids=str)
def test_policies_that_look_in_their_own_way_are_left_alone(policy):
    assert policy.for_platform("cpu", latent=False) == policy
    with pytest.raises(InputError, match=r"has no option 'keys_first': expected one of budget, page_size"):
        make_policy(name_of(policy), {"keys_first": True})


def test_keys_come_first_only_where_they_can(bundled):
    with pytest.raises(
        InputError,
        match=r"^keys_first=true is not possible in latent layers, whose keys hold the values: leave keys_first out$",
    ):
        Clustered(keys_first=True).for_platform("cpu", latent=True)
    with pytest.raises(InputError, match=r"^keys_first=true needs resident=false, got True: leave keys_first out$"):
        Clustered(keys_first=True, resident=True)
    with pytest.raises(
        InputError, match=r"^clustered fetches single tokens, which TPU cannot: use a cache that fetches pages$"
    ):
        make_plan(bundled[0], Clustered(keys_first=True), batch_size=1, prompt_tokens=99, new_tokens=6, platform="tpu")


def test_a_pool_of_more_slots_than_32_bits_count_is_refused(bundled):
    sizes = dict(batch_size=1, prompt_tokens=99, new_tokens=6)
    plan = make_plan(bundled[0], Clustered(), **sizes)  # 4 layers, 64 pages of 16, 2 KV heads, keys and values: 16,384 slots
    assert plan.pool_shape(2**17 - 1)[0] == 2**17 - 1
    with pytest.raises(
        InputError, match=r"^a pool .* at most 2147483647 keys and values, this one would have 2147483648: use a"
    ):
        plan.pool_shape(2**17)
    assert make_plan(bundled[0], Clustered(keys_first=False), **sizes).pool_shape(2**17)[0] == 2**17


def test_host_sends_keys_of_pages_and_values_of_the_best():
    prompt, new = draw((250,), 1)
    layer = Layer(Clustered(budget=64, candidates=1), (250,), *prompt)
    layer.step(*(x[0] for x in new))
    pages, exact = layer.policy.num_ranked(1000), int((np.asarray(layer.state.weights) > 0).sum())
    assert pages == 2 * 4 and exact == 2 * (64 - 8 - 8 - 1)  # KV heads; sinks, window and the newest token
    assert layer.state.fetched.tolist() == [(2 * pages * 16 + exact) // 2]
    assert fetched_per_step(layer.policy, 1000) == (pages * 16 + 64 - 8 - 1) // 2


@pytest.mark.parametrize("lse", [-np.inf, 0.0, 95.0, 300.0])
def test_the_rest_may_outweigh_all_that_was_fetched(lse):
    """At lse 95 and 300 the tail outweighs the fetched pages by more than fp32 can hold: another query chose the pages."""
    rng = np.random.default_rng(0)
    q, k, v, keys = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 2, 8), (1, 6, 8), (1, 6, 8), (1, 3, 4, 8)))
    values, mask = rng.standard_normal(keys.shape).astype(np.float32), np.ones((1, 3, 4), bool)
    rest = Attended(jnp.ones((1, 2, 8)), jnp.full((1, 2), lse, jnp.float32))

    def attend(q, k, v, keys, values, mask, rest):
        pages = jax.tree.map(lambda x: x[0], digest(keys[None], values[None], mask[None]))
        room = dict(room=jnp.asarray([12]), most=12)
        ranked = rank_tokens(q, (k, jnp.ones((1, 6), bool)), keys, pages, rest, None, scoring=Scoring(1.0), **room)
        return ranked.attended(v, jnp.take_along_axis(values.reshape(1, 12, 8), ranked.best[..., None], axis=1))

    attended = jitted(attend, q, k, v, keys, values, mask, rest)
    joined = [np.concatenate([x, y.reshape(1, 12, 8)], axis=1)[0].astype(np.float64) for x, y in ((k, keys), (v, values))]
    scores = q[0].astype(np.float64) @ joined[0].T
    exact_lse = np.logaddexp.reduce(scores, axis=1)
    total = np.logaddexp(exact_lse, lse)
    out = np.exp(scores - total[:, None]) @ joined[1] + np.exp(lse - total)[:, None]
    np.testing.assert_allclose(np.asarray(attended.lse)[0], total, rtol=tolerances.EXACT)
    np.testing.assert_allclose(np.asarray(attended.out)[0], out, rtol=0, atol=tolerances.EXACT)
