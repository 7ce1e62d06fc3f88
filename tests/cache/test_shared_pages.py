"""Clustered layers that share: pages and packing order (`reuse`), and a guess of a layer's queries (`prefetch`)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icejax.cache.protocol import Heads, Lengths, View
from icejax.cache.registry import Clustered, Full
from icejax.cache.sizes import CacheSpec
from icejax.engine import prefill as prefilling
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.layers import LayerPlace, run_layers
from icejax.models.decoder import DecoderLayer
from icejax.ops.attention.dense import Attended, Scoring
from icejax.ops.pages import tree, tree_walk
from icejax.ops.pages.digests import digest
from tests import tolerances
from tests.helpers import families
from tests.helpers.paged import scatter_of
from tests.helpers.run import greedy, jitted, plan_for

LAYERS = 5  # with reuse=3 the last group has two layers
SMALL = Clustered(budget=64, compact_every=32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    built = families.build(families.row("llama-gqa"), num_hidden_layers=LAYERS)
    return families.load(built, tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(reuse=3),
        dict(prefetch=True),
        dict(reuse=2, prefetch=True, resident=True),
        dict(reuse=3, look=4),
        dict(prefetch=True, look=4),
    ],
    ids=str,
)
def test_room_for_all_tokens_is_still_the_full_cache(model, options):
    prompts = [families.tokens(300), families.tokens(90)]
    expected = greedy(model, Full(), prompts, 80)
    actual = greedy(model, Clustered(budget=512, compact_every=32, **options), prompts, 80)
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_allclose(actual[1], expected[1], rtol=0, atol=tolerances.LOGITS)


@pytest.mark.slow
def test_layers_of_a_group_fetch_the_pages_of_its_first(model):
    plan = plan_for(model, replace(SMALL, reuse=3, keys_first=False), [families.tokens(300)], 80)
    state, _, pool = prefilling.prefill(model, [families.tokens(300)], plan)
    decoding = DecodePrograms(model, plan)
    for _ in range(70):  # past flushes and compactions
        state, _, pool = decoding.step(state, pool)
        ids = [np.asarray(layer.ids) for layer in state.cache.layers]
        for follower, leader in ((1, 0), (2, 0), (4, 3)):
            np.testing.assert_array_equal(ids[follower], ids[leader])
        assert (ids[3] != ids[0]).any() or (ids[0] < 0).all()  # after a compaction no ids are known


def test_a_follower_is_packed_in_the_order_of_its_leader():
    """Values are positions and the follower's keys noise: equal values show the same tokens in the pages of both layers."""
    policy, tokens = replace(SMALL, reuse=2), 256
    sizes = dict(batch_size=1, num_heads=4, num_kv_heads=2, head_dim=16, value_dim=16)
    spec = CacheSpec(**sizes, prompt_capacity=tokens, new_capacity=tokens, dtype="float32")
    rng = np.random.default_rng(0)
    q, k, noise = (jnp.asarray(rng.standard_normal((1, tokens, n, 16)), jnp.float32) for n in (4, 2, 2))
    token_positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.float32)[None, :, None, None], k.shape)
    lengths = Lengths.of(jnp.asarray([200]))

    leading_policy, following_policy = policy.for_layers([0, 1], of=2)

    def prefill(k, policy, shared=None):
        attended = Attended(q, q[..., 0])
        outcome = policy.prefill(
            policy.init(spec),
            Heads(q, k, token_positions, lengths.seen, Scoring(0.25)),
            attended,
            View(Lengths.none(1), shared=shared),
        )
        return outcome.state, outcome.pages, outcome.shared

    _, leader, order = jitted(prefill, k, policy=leading_policy)
    _, unled, _ = jitted(prefill, noise, policy=leading_policy)
    state, follower, _ = jitted(lambda k, shared: prefill(k, following_policy, shared), noise, order)
    positions = np.asarray(follower)[:, :, :, 1, :, 0].astype(int)
    np.testing.assert_array_equal(positions, np.asarray(leader)[:, :, :, 1, :, 0])
    assert (positions != np.asarray(unled)[:, :, :, 1, :, 0]).any()
    digests = state.index.levels[0]
    keys, counts = np.asarray(follower)[:, 0, 0, 0], np.asarray(digests.count)[0, 0]
    for page, count in enumerate(counts[: len(keys)]):
        np.testing.assert_array_equal(keys[page, :count], np.asarray(noise)[0, positions[page, 0, 0, :count], 0])
        if count:
            *outliers, inlier_mean = (np.asarray(x.data)[0, 0, page] for x in (*digests.outliers, digests.mean))
            mean = (sum(outliers) + (count - 2) * inlier_mean) / count if count > 2 else inlier_mean
            np.testing.assert_allclose(mean, keys[page, :count].mean(0), rtol=0, atol=tolerances.DIGEST)


@pytest.mark.slow
def test_walk_by_guess_fetches_for_guess_weighs_for_query(monkeypatch):
    monkeypatch.setattr(tree, "TOP", 16)
    rng = np.random.default_rng(0)
    k, v, q, guess = (
        jnp.asarray(rng.standard_normal(s), jnp.float32)
        for s in ((1, 1, 128, 4, 8), (1, 1, 128, 4, 8), (1, 1, 2, 8), (1, 1, 2, 8))
    )
    mask = np.ones((1, 1, 128, 4), bool)
    levels = jitted(lambda *pages: tree.build(digest(*pages)), k, v, mask)
    assert len(levels) == 2
    options = dict(
        scatter=jnp.asarray(scatter_of(np.asarray(k), mask), jnp.float32),
        scoring=Scoring(8**-0.5),
        rules=tree_walk.WalkRules(opened=4, selected=6),
    )
    by_query, by_guess = jitted(tree_walk.walk, q, levels, **options), jitted(tree_walk.walk, guess, levels, **options)
    guessed = jitted(lambda q, levels, guess: tree_walk.walk(q, levels, guess=guess, **options), q, levels, guess)
    followed = jitted(lambda q, levels, path: tree_walk.walk(q, levels, path=path, **options), q, levels, by_guess.path)
    for walked in (guessed, followed):
        np.testing.assert_array_equal(walked.page_ids, by_guess.page_ids)
        assert set(np.asarray(walked.page_ids).ravel()) != set(np.asarray(by_query.page_ids).ravel())
    for name in ("tail_out", "tail_lse"):
        np.testing.assert_array_equal(getattr(guessed, name), getattr(followed, name))
        assert not np.allclose(getattr(guessed, name), getattr(by_guess, name))
    exact = jitted(lambda q, levels: tree_walk.walk(q, levels, guess=q, **options), q, levels)
    for name in ("page_ids", "tail_out", "tail_lse"):
        np.testing.assert_array_equal(getattr(exact, name), getattr(by_query, name))


def test_layer_walk_hands_on_input_and_selection(model):
    def run(layer: DecoderLayer, x: jax.Array, place: LayerPlace):
        assert layer is model.model.layers[place.number]
        return x + 1, (place.number, place.before, place.shared), f"found by {place.number}"

    for number, (x, handed_on) in enumerate(run_layers(model, jnp.zeros((1, 1, 1)), run)):
        assert x == number + 1
        assert handed_on == (number, number - 1, f"found by {number - 1}") if number else (0, None, None)
    assert number == LAYERS - 1


def test_the_guess_of_a_layer_is_its_query_for_the_input_before(model):
    """Computed by hand with the layer's own norm, projection and rotation, from another layer's input."""
    layer, rng = model.model.layers[1], np.random.default_rng(0)
    x = rng.standard_normal((1, 1, 64)).astype(np.float32)
    normal = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + layer.input_layernorm.eps)
    normal = normal * np.asarray(layer.input_layernorm.weight[...])
    q = (normal @ np.asarray(layer.self_attn.q_proj.weight[...]).T).reshape(4, 16)
    angles = 9 * 10000.0 ** (-np.arange(8) / 8)
    first, second = q[:, :8], q[:, 8:]
    expected = np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=-1
    )
    guess = jitted(lambda x: layer.enter(x, jnp.asarray([[9]]), jnp.asarray([10])).q, x)[0, 0]
    np.testing.assert_allclose(guess, expected, rtol=0, atol=tolerances.EXACT)
