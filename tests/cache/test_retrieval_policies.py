"""Retrieval methods of other papers against plain numpy: the selected pages or tokens, and the attention outputs."""

import jax.numpy as jnp
import numpy as np
import pytest

import icejax
from icejax.cache.index.hashes import planes
from icejax.cache.index.product_codes import approximate
from icejax.cache.policies.arkvale import CuboidIndex
from icejax.cache.policies.quest import bound
from icejax.cache.registry import ArkVale, ClusterKV, MagicPIG, PQCache, RetroInfer, ShadowKV
from icejax.engine.plan import make_plan
from icejax.evaluation import attention_map
from tests import tolerances
from tests.helpers.layer import KV_HEADS, PROMPT, THETA, Layer, dense, draw, stored
from tests.helpers.policy_steps import LENGTHS, STEPS, at_positions, compare, numbers, row_of
from tests.helpers.run import jitted
from tests.reference import clusters as reference_clusters
from tests.reference import retrieval as reference
from tests.reference.peers import rotate


@pytest.mark.slow
@pytest.mark.parametrize("heads", ["layer", "kv"])
def test_arkvale_chooses_pages_for_all_heads_of_a_layer(heads):
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    policy = ArkVale(budget=64, page_size=8, heads=heads)
    options = dict(heads=heads, count=4, sinks=16, fill=8)
    differ = []

    def check(layer, row, peer, q):
        page_ids = numbers(layer, row, peer)
        for head, chosen in enumerate(peer.chosen(q)):
            ids = np.asarray(layer.state.ids)[row, head]
            assert sorted(ids[ids >= 0]) == sorted(page_ids[i] for i in chosen)
        differ.append(len(set(map(tuple, peer.chosen(q)))) > 1)
        peer.end_step()

    compare(
        policy, [reference.ArkVale(8, **options, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)], prompt, new, check
    )
    assert any(differ) == (heads == "kv")


def test_arkvale_ranks_a_page_by_its_one_matching_key():
    """One page has 31 keys near zero and one along the query; all other pages lie a little along it, so mean keys mislead."""
    rng = np.random.default_rng(0)
    q = np.sign(rng.standard_normal(16)).astype(np.float32)
    k = 0.3 * rng.standard_normal((1, 1, 12, 32, 16)).astype(np.float32)
    k[0, 0, 1:] += 0.15 * q
    k[0, 0, 0, 17] += 3.0 * q
    index = jitted(CuboidIndex().describe, jnp.asarray(k), None, jnp.ones(k.shape[:4], bool))
    boxes = np.asarray(jitted(bound, jnp.asarray(q)[None, None, None], index))[0, 0, 0]
    means = k[0, 0].mean(1) @ q
    assert boxes.argmax() == 0 and means.argmin() == 0


@pytest.mark.slow
def test_pqcache_chooses_tokens_by_keys_made_of_centroids():
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    policy = PQCache(budget=64, sinks=8, bits=4)
    assert policy.window_layout.slots == 28 and policy.num_fetched(1000) == 28
    options = dict(count=28, parts=2, centroids=16, iterations=10, sinks=8, fill=12)

    def check(layer, row, peer, q):
        for head, chosen in enumerate(peer.chosen(q)[::2] if peer.paged() else ()):
            ids = np.asarray(layer.state.ids)[row, head]
            assert sorted(ids[ids >= 0]) == at_positions(layer, row, peer, chosen)
        peer.end_step()
        if peer.centroids is not None:
            centroids = np.asarray(layer.state.index.centroids)[row]
            np.testing.assert_allclose(centroids, peer.centroids, rtol=0, atol=tolerances.EXACT)

    compare(
        policy,
        [reference_clusters.PQCache(**options, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)],
        prompt,
        new,
        check,
    )


@pytest.mark.slow
def test_clusterkv_chooses_whole_clusters_for_every_query_head():
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    policy = ClusterKV(budget=64, sinks=8, clusters=20, iterations=5)
    options, cut = dict(count=policy.num_fetched(1000), centroids=20, iterations=5, sinks=8, fill=0), []
    assert options["count"] == 40

    def check(layer, row, peer, q):
        for head, pair in enumerate(zip(*[iter(peer.chosen(q))] * 2, strict=True) if peer.paged() else ()):
            attended = np.asarray(layer.state.weights)[row, head, :, 0] > 0  # a token of both query heads is listed twice
            assert sorted(np.asarray(layer.state.ids)[row, head][attended]) == at_positions(
                layer, row, peer, {*pair[0], *pair[1]}
            )
            codes = peer.codes()[head][0]
            for positions in pair:
                selected = np.isin(peer.paged(), positions)
                cut.append(sum(0 < selected[codes == i].sum() < (codes == i).sum() for i in range(20)))
        peer.end_step()

    compare(
        policy,
        [reference_clusters.ClusterKV(**options, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)],
        prompt,
        new,
        check,
    )
    assert set(cut) == {0, 1}  # at most one cluster, the last, is taken in part


def test_pqcache_scores_are_products_with_rebuilt_keys():
    prompt, new = draw(LENGTHS, 1)
    index = Layer(PQCache(budget=64, sinks=8, parts=4, bits=5), LENGTHS, *prompt).state.index
    q = new[0][0].reshape(len(LENGTHS), KV_HEADS, 2, -1)
    scores = np.asarray(jitted(approximate, jnp.asarray(q), index))
    centroids, codes = (np.asarray(x) for x in (index.centroids, index.codes))
    codes = codes.reshape(*codes.shape[:2], -1, 4)
    for row, head in np.ndindex(codes.shape[:2]):
        rebuilt = np.concatenate([centroids[row, head, part][codes[row, head, :, part]] for part in range(4)], axis=-1)
        np.testing.assert_allclose(scores[row, head], q[row, head] @ rebuilt.T, rtol=0, atol=tolerances.EXACT)
    assert index.codes.dtype == np.uint8


def test_a_key_that_cannot_be_cut_is_told(bundled):
    message = "^parts must divide the 64 channels of a key, got 3$"
    with pytest.raises(icejax.InputError, match=message):
        make_plan(bundled[0], PQCache(parts=3), batch_size=1, prompt_tokens=99, new_tokens=6)


@pytest.mark.slow
def test_retroinfer_attends_to_clusters_and_estimates_the_next():
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    policy = RetroInfer(budget=90, window=24, estimated=0.3, iterations=4)
    options, estimated = dict(count=policy.num_fetched(1000), estimated=0.3, iterations=4, sinks=4, fill=8), []
    assert options["count"] == 62

    def check(layer, row, peer, q):
        for head in range(KV_HEADS):
            exact, estimated_clusters = peer.taken(q, head)
            ids = np.asarray(layer.state.ids)[row, head]
            assert sorted(ids[ids >= 0]) == at_positions(layer, row, peer, [p for cluster in exact for p in cluster])
            estimated.append(len(estimated_clusters))
        peer.end_step()

    compare(
        policy,
        [reference_clusters.RetroInfer(**options, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)],
        prompt,
        new,
        check,
    )
    assert max(estimated) > 4


@pytest.mark.slow
def test_estimate_is_exact_where_tokens_of_a_cluster_are_equal():
    """Each of twelve pages has one key and one value, so each is a cluster; three fit the budget."""
    prompt, new = draw((196,), 1)
    first_of_page = 4 + np.arange(192) // 16 * 16  # pages begin after four sinks
    for x in prompt[1:]:
        x[:, 4:196] = x[:, first_of_page]
    prompt[1][:, 4:196] += 5 * np.eye(16, dtype=np.float32)[first_of_page // 16][None, :, None]  # moves the pages apart
    expected = dense(prompt, new, (196,), 0)
    for share, close in ((9 / 12, True), (8 / 12, False)):
        layer = Layer(RetroInfer(budget=20 + 48, window=16, estimated=share), (196,), *prompt)
        out = layer.step(*(x[0] for x in new))
        assert np.allclose(out, expected, rtol=0, atol=tolerances.EXACT) == close


@pytest.mark.slow
@pytest.mark.parametrize("budget", [120, 60])
def test_magicpig_samples_tokens_that_share_hashes(budget):
    """All of them if they fit the budget, else those that share most tables."""
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    policy, counts = MagicPIG(budget=budget, window=24, bits=5, tables=24), []
    sides = planes(KV_HEADS, 16, 120, 0).reshape(KV_HEADS, 16, 24, 5)
    options = dict(count=budget - 4 - 24, planes=sides, sinks=4, fill=8)

    def check(layer, row, peer, q):
        for head, queries in enumerate(peer.tokens.grouped(q)):
            sampled = [peer.sampled(query, head)[0] for query in queries]
            attended = np.asarray(layer.state.weights)[row, head, :, 0] > 0  # a token of both query heads is listed twice
            assert sorted(np.asarray(layer.state.ids)[row, head][attended]) == at_positions(
                layer, row, peer, {*sum(sampled, [])}
            )
            counts.append(max(map(len, sampled)))
        peer.end_step()

    compare(policy, [reference.MagicPIG(**options, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)], prompt, new, check)
    assert (max(counts) == options["count"]) == (budget == 60)


def test_a_sampled_token_weighs_as_much_as_it_is_unlikely():
    """Over many random planes the share of tokens with a common hash equals the estimated probability."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((200, 16))
    keys[:, 0] += 1
    shared = []
    for seed in range(60):
        sides = planes(1, 16, 80, seed)[0].reshape(16, 20, 4)
        shared.append(((np.einsum("nh,hlb->nlb", keys, sides) > 0) == (sides[0] > 0)).all(-1).sum(1) >= 2)
    probability = jitted(
        MagicPIG(bits=4, tables=20)._likely, jnp.asarray(keys[:, 0] / np.linalg.norm(keys, axis=1), jnp.float32)
    )
    assert abs(np.mean(shared) - np.mean(probability)) < 0.01 and np.corrcoef(np.mean(shared, 0), probability)[0, 1] > 0.95


@pytest.mark.slow
def test_shadowkv_attends_to_low_rank_pages_and_outliers():
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    mix = np.linalg.qr(np.random.default_rng(0).standard_normal((32, 32)))[0]
    unrotated = (prompt[1].reshape(3, PROMPT, 32) * 3 * 0.85 ** np.arange(32)) @ mix  # directions differ in variance
    prompt[1][:] = np.stack([rotate(x, np.arange(PROMPT), THETA) for x in unrotated.reshape(3, PROMPT, KV_HEADS, 16)])
    policy = ShadowKV(budget=96, window=1, outliers=3, rank=12)
    options = dict(outliers=3, count=7, rank=12, theta=THETA, fill=8)
    assert policy.num_fetched(1000) == 10

    def check(layer, row, peer, q):
        page_ids = numbers(layer, row, peer)
        for head, chosen in enumerate(peer.chosen(q)):
            ids = np.asarray(layer.state.ids)[row, head]
            assert sorted(ids[ids >= 0]) == sorted(page_ids[i] for i in chosen)
        peer.end_step()

    compare(policy, [reference.ShadowKV(**options, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)], prompt, new, check)


def test_shadowkv_keeps_the_keys_of_a_page_with_an_outlier():
    prompt, _ = draw((200,), 1)
    prompt[1][0] = prompt[1][0, :1] + 0.1 * prompt[1][0]
    prompt[1][0, 83, 1] *= -1  # in the second KV head, page 10
    layer = Layer(ShadowKV(budget=96, window=1, outliers=1, rank=1), (200,), *prompt)
    keys = stored(layer.pool, layer.table)[0, :24, 0, :, 0].reshape(24, KV_HEADS, 8, 16)
    same = (keys == prompt[1][0, :192].reshape(24, 8, KV_HEADS, 16).swapaxes(1, 2)).all((2, 3))
    assert same.sum(0).tolist() == [1, 1] and same[10].tolist() == [False, True]
    np.testing.assert_array_equal(np.asarray(layer.state.index.kept)[0, :, :24], same.T)


def test_pages_of_rebuilt_keys_are_explained(bundled):
    """Rebuilt keys too have their tokens' positions."""
    model, prompt = bundled[0], list(range(3, 200))
    policy = ShadowKV(dense_layers=3, rank=8)
    plan = make_plan(model, policy, batch_size=1, prompt_tokens=len(prompt), new_tokens=9)
    positions = attention_map._positions(model, prompt, plan)[3]
    assert (positions.reshape(len(positions), -1)[:, :165] == np.arange(165)).all()  # the last four pages are in the window


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (ArkVale, dict(page_size=12), "page_size must be a power of two, got 12"),
        (ArkVale, dict(budget=159), "budget must be at least 160, got 159"),
        (ArkVale, dict(sinks=-1), "sinks must be at least 0, got -1"),
        (ArkVale, dict(window=1), "window must be at least 2, got 1"),
        (ArkVale, dict(heads="all"), "heads must be one of layer, kv, got 'all'"),
        (ArkVale, dict(dense_layers=-1), "dense_layers must be at least 0, got -1"),
        (ClusterKV, dict(sinks=-1), "sinks must be at least 0, got -1"),
        (ClusterKV, dict(budget=32), "budget must be at least 33, got 32"),
        (ClusterKV, dict(clusters=0), "clusters must be at least 1, got 0"),
        (ClusterKV, dict(iterations=1.5), "iterations must be a whole number, got 1.5"),
        (
            ShadowKV,
            dict(budget=48),
            "budget must hold a window of 5 pages, 1 outlier pages and one page to select, of 8 tokens each: at least 56, got 48",
        ),
        (ShadowKV, dict(page_size=12), "page_size must be a power of two, got 12"),
        (ShadowKV, dict(window=-1), "window must be at least 0, got -1"),
        (ShadowKV, dict(outliers=-1), "outliers must be at least 0, got -1"),
        (ShadowKV, dict(rank=0), "rank must be at least 1, got 0"),
        (RetroInfer, dict(sinks=-1), "sinks must be at least 0, got -1"),
        (RetroInfer, dict(window=15), "window must be at least 16, got 15"),
        (RetroInfer, dict(budget=68), "budget must be at least 69, got 68"),
        (RetroInfer, dict(estimated=1.5), "estimated must be a number from 0 to 1, got 1.5"),
        (RetroInfer, dict(iterations=0), "iterations must be at least 1, got 0"),
        (MagicPIG, dict(sinks=-1), "sinks must be at least 0, got -1"),
        (MagicPIG, dict(window=15), "window must be at least 16, got 15"),
        (MagicPIG, dict(budget=68), "budget must be at least 69, got 68"),
        (MagicPIG, dict(bits=17), "bits must be at most 16, got 17"),
        (MagicPIG, dict(tables=1), "tables must be at least 2, got 1"),
        (MagicPIG, dict(seed=-1), "seed must be at least 0, got -1"),
        (PQCache, dict(sinks=-1), "sinks must be at least 0, got -1"),
        (PQCache, dict(window=16), "window must be at least 17, got 16"),
        (PQCache, dict(budget=49), "budget must be at least 50, got 49"),
        (PQCache, dict(parts=0), "parts must be at least 1, got 0"),
        (PQCache, dict(bits=13), "bits must be at most 12, got 13"),
        (PQCache, dict(iterations=-1), "iterations must be at least 0, got -1"),
    ],
    ids=str,
)
def test_bad_options_say_what_is_expected(kind, options, message):
    with pytest.raises(icejax.InputError, match=f"^{message}$"):
        kind(**options)
