"""The digest tree: digests of every level, the pages that a walk selects, and the tail that stands for all other pages."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icejax.ops.attention.dense import Scoring, attend_with_lse, merge_by_lse
from icejax.ops.pages import tree, tree_walk
from icejax.ops.pages.digests import TAIL_CLAMP, Vectors, digest, score
from icejax.ops.pages.key_scatter import along
from icejax.ops.pages.tree_walk import WalkRules
from icejax.ops.pages.value_fit import FromKeys
from tests import tolerances
from tests.helpers.dense import capped
from tests.helpers.paged import check, float64, pages_of, put_in, read, scatter_of, tree_of
from tests.helpers.run import jitted
from tests.reference.clustered import bands


def walk_options(selected: int, *, tail: bool = True) -> dict:
    return dict(scoring=Scoring(16**-0.5), rules=WalkRules(opened=16, selected=selected, tail=tail))


@pytest.fixture
def small_top(monkeypatch):
    monkeypatch.setattr(tree, "TOP", 512)


@pytest.mark.slow
def test_every_level_stays_exact_when_pages_are_put_in(small_top):
    keys, values, mask = pages_of(np.random.default_rng(4), 603)
    mask[:, :, 570:] = False
    levels = jitted(tree_of, keys, values, mask)
    assert [pages.count.shape[-1] for pages in levels] == [608, 76]
    for page, count in ((570, 1), (571, 1), (599, 1), (3, 1), (583, 17), (31, 2), (96, 16), (15, 34), (592, 8), (600, 3)):
        new = pages_of(np.random.default_rng(page), count)
        for current, pages in zip((keys, values, mask), new, strict=True):
            current[:, :, page : page + count] = pages
        levels = jitted(put_in, levels, *new, jnp.int32(page))
    digests = list(map(read, levels))
    for page in range(603):
        check(digests[0], (0, 0, page), float64(keys[0, 0, page], values[0, 0, page], mask[0, 0, page]))
    for node in range(76):
        children = np.s_[0, 0, 8 * node : 8 * node + 8]
        check(digests[1], (0, 0, node), float64(keys[children], values[children], mask[children]))


@pytest.mark.slow
def test_what_is_around_a_page_is_all_that_its_lineage_reads(monkeypatch):
    monkeypatch.setattr(tree, "TOP", 8)
    keys, values, mask = pages_of(np.random.default_rng(4), 603)
    levels = jitted(tree_of, keys, values, mask)
    assert [x.count.shape[-1] for x in levels] == [608, 80, 16, 2]
    for page_id in (0, 7, 8, 77, 570, 602):
        page, page_id = jitted(digest, *pages_of(np.random.default_rng(page_id), 1)), jnp.int32(page_id)
        around = tree.families_around(levels, page_id)
        assert [x.count.shape[-1] for x in around[:-1]] == [8, 8, 8]
        lineages = (jax.tree.leaves(jitted(tree.lineage, source, page, page_id)) for source in (levels, around))
        for expected, actual in zip(*lineages, strict=True):
            np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def test_a_key_that_stands_out_is_found_whatever_shares_its_page(small_top):
    """The other keys of the page cancel the outlier in the page's mean; seven other pages share the node."""
    rng = np.random.default_rng(14)
    keys, values = (rng.standard_normal((1, 1, 600, 16, 64)).astype(np.float32) for _ in range(2))
    direction = rng.standard_normal(64)
    direction /= np.linalg.norm(direction)
    keys[0, 0, 77, 5] = 16 * direction
    keys[0, 0, 77] -= (16 * direction / 16).astype(np.float32)
    q = jnp.asarray((7 * direction).astype(np.float32))[None, None, None]
    mask = np.ones(keys.shape[:4], bool)
    levels, scatter = jitted(tree_of, keys, values, mask), scatter_of(keys, mask).astype(np.float32)
    assert len(levels) == 2
    result = jitted(tree_walk.walk, q, levels, scatter, scoring=Scoring(64**-0.5), rules=WalkRules(opened=1, selected=1))
    assert int(result.page_ids[0, 0, 0]) == 77


def reference_walk(q, keys, values, mask, selected: int):
    """Returns the chosen pages, and the tail's output and log-sum-exp per head, from a float64 scan over all pages."""
    size = q.shape[-1]
    digests = [float64(k, v, m) for k, v, m in zip(keys, values, mask, strict=True)]
    count, first, second, mean, width, value = (np.asarray(x) for x in zip(*digests, strict=True))
    scaled, variances = q.astype(np.float64) / size**0.5, np.diag(scatter_of(keys[None, None], mask[None, None])[0, 0])
    band_energies, outliers = scaled**2 * variances @ bands(size).T / (variances @ bands(size).T), np.stack([first, second])
    with np.errstate(divide="ignore"):
        first, second = np.log(count) + scaled @ mean.T, 0.5 * band_energies @ width.T
    outlier_scores = np.where(count > 0, (scaled @ outliers.swapaxes(1, 2)).max(0), -np.inf)
    estimates, scores = (np.maximum(first + x, outlier_scores) for x in (second, np.minimum(second, TAIL_CLAMP)))
    weight_sums = np.exp(estimates - estimates.max(-1, keepdims=True))
    weight_sums = np.where(count > 0, (weight_sums / weight_sums.sum(-1, keepdims=True)).sum(0), -1)
    chosen = np.argsort(-weight_sums, kind="stable")[:selected]
    scores[:, chosen] = -np.inf
    weights = np.exp(scores)
    return chosen, weights @ value / weights.sum(-1, keepdims=True), np.log(weights.sum(-1))


@pytest.mark.parametrize("wide", [12, 16, 20])
def test_a_flat_walk_equals_float64(wide):
    rng = np.random.default_rng(6)
    keys, values, mask = pages_of(rng, 50, wide=wide)
    q = rng.standard_normal((1, 1, 2, 16)).astype(np.float32) * 3
    levels = jitted(tree_of, keys, values, mask)
    scatter = scatter_of(keys, mask).astype(np.float32)
    result = jitted(tree_walk.walk, jnp.asarray(q), levels, scatter, **walk_options(6))
    chosen, out, lse = reference_walk(q[0, 0], keys[0, 0], values[0, 0], mask[0, 0], 6)
    non_empty = np.asarray(result.counts)[0, 0] > 0
    assert set(np.asarray(result.page_ids)[0, 0][non_empty]) == {page for page in chosen if mask[0, 0, page].any()}
    np.testing.assert_allclose(result.tail_out[0, 0], out, rtol=0, atol=tolerances.EXACT)
    np.testing.assert_allclose(result.tail_lse[0, 0], lse, rtol=0, atol=1e-4)
    without_tail = jax.eval_shape(
        lambda q: tree_walk.walk(q, levels, jnp.zeros((1, 1, 16, 16)), **walk_options(6, tail=False)),
        jnp.asarray(q),
    )
    assert without_tail.tail_out.shape == result.tail_out.shape


@pytest.mark.parametrize("last", [536, 832], ids=["three of 13 blocks", "seven of 13 blocks"])
def test_a_walk_equals_float64_among_empty_pages_and_reads_no_empty_block(last):
    """A prompt fills the first pages and its answer later ones; at most 4 of 13 blocks of 64 pages are gathered."""
    rng = np.random.default_rng(16)
    keys, values, mask = pages_of(rng, 832)
    mask[:, :, 70:528] = mask[:, :, last:] = False
    q = rng.standard_normal((1, 1, 2, 16)).astype(np.float32) * 3
    levels, scatter = jitted(tree_of, keys, values, mask), jnp.asarray(scatter_of(keys, mask).astype(np.float32))
    if last == 536:
        levels = (dataclasses.replace(levels[0], value=Vectors(levels[0].value.data.at[:, :, 576:].set(np.nan), None)),)
    result = jitted(tree_walk.walk, jnp.asarray(q), levels, scatter, **walk_options(20))
    chosen, out, lse = reference_walk(q[0, 0], keys[0, 0], values[0, 0], mask[0, 0], 20)
    np.testing.assert_array_equal(result.page_ids[0, 0], chosen)
    np.testing.assert_array_equal(result.counts[0, 0], mask[0, 0, chosen].sum(1))
    np.testing.assert_allclose(result.tail_out[0, 0], out, rtol=0, atol=tolerances.EXACT)
    np.testing.assert_allclose(result.tail_lse[0, 0], lse, rtol=0, atol=1e-4)
    followed = jitted(
        lambda q, path: tree_walk.walk(q, levels, scatter, **walk_options(20), path=path), jnp.asarray(q), result.path
    )
    np.testing.assert_array_equal(followed.page_ids, result.page_ids)


def test_a_tree_with_all_nodes_open_equals_the_flat_walk(small_top):
    rng = np.random.default_rng(7)
    keys, values, mask = pages_of(rng, 900, heads=2)
    q = jnp.asarray(rng.standard_normal((1, 2, 3, 16)).astype(np.float32) * 2)
    levels = jitted(tree_of, keys, values, mask)
    assert len(levels) == 2
    scatter = scatter_of(keys, mask).astype(np.float32)
    one_level, all_levels = (
        jitted(tree_walk.walk, q, subtree, scatter, scoring=Scoring(16**-0.5), rules=WalkRules(opened=opened, selected=12))
        for subtree, opened in ((levels[:1], 1), (levels, 113))
    )
    np.testing.assert_array_equal(np.sort(one_level.page_ids), np.sort(all_levels.page_ids))
    np.testing.assert_allclose(all_levels.tail_out, one_level.tail_out, rtol=0, atol=tolerances.EXACT)
    np.testing.assert_allclose(all_levels.tail_lse, one_level.tail_lse, rtol=0, atol=1e-4)


def test_every_token_counts_once_however_few_nodes_are_open(small_top):
    """A zero query scores every node by its count alone."""
    keys, values, mask = pages_of(np.random.default_rng(7), 900)
    levels = jitted(tree_of, keys, values, mask)
    for opened in (1, 8, 113):
        result = jitted(
            tree_walk.walk,
            jnp.zeros((1, 1, 1, 16)),
            levels,
            np.zeros((1, 1, 16, 16), np.float32),
            scoring=Scoring(16**-0.5),
            rules=WalkRules(opened=opened, selected=5),
        )
        counted = np.exp(float(result.tail_lse[0, 0, 0])) + np.asarray(result.counts).sum()
        assert counted == pytest.approx(mask.sum(), rel=1e-5)


def test_tail_and_exact_part_of_point_pages_equal_dense():
    """If all tokens of a page have the same key and the same value, the digest is exact."""
    rng = np.random.default_rng(8)
    keys, values = (np.repeat(rng.standard_normal((1, 1, 40, 1, 16)), 16, axis=3).astype(np.float32) for _ in range(2))
    mask = np.ones((1, 1, 40, 16), bool)
    q = rng.standard_normal((1, 1, 2, 16)).astype(np.float32) * 3
    levels = jitted(tree_of, keys, values, mask)
    scatter = scatter_of(keys, mask).astype(np.float32)
    result = jitted(tree_walk.walk, jnp.asarray(q), levels, scatter, **walk_options(3))
    chosen = np.asarray(result.page_ids)[0, 0]
    one_row = (x.reshape(1, -1, 16) for x in (q, keys[0, 0, chosen], values[0, 0, chosen]))
    exact = jitted(attend_with_lse, *one_row, np.ones((1, 48), bool), scoring=Scoring(16**-0.5))
    out, _ = jitted(merge_by_lse, *exact, result.tail_out[0], result.tail_lse[0])
    scores = q[0, 0].astype(np.float64) @ keys.reshape(-1, 16).T.astype(np.float64) / 4
    weights = np.exp(scores)
    expected = weights @ values.reshape(-1, 16) / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(out[0], expected, rtol=0, atol=tolerances.EXACT)


@pytest.mark.parametrize("dtype", ["float16", *(pytest.param(x, marks=pytest.mark.slow) for x in ("bfloat16", "float32"))])
@pytest.mark.parametrize(
    "scale", [pytest.param(1e-3, marks=pytest.mark.slow), pytest.param(1.0, marks=pytest.mark.slow), 300.0]
)
def test_tail_is_finite_at_any_scale_and_width(small_top, dtype, scale):
    rng = np.random.default_rng(9)
    keys, values, mask = pages_of(rng, 600)
    mask[:, :, 100:500] = False
    q = jnp.asarray(rng.standard_normal((1, 1, 2, 16)) * scale, dtype)
    levels = jitted(tree_of, jnp.asarray(keys * scale, dtype), jnp.asarray(values, dtype), mask)
    walk = functools.partial(tree_walk.walk, **walk_options(4))
    scatter = scatter_of(keys * scale, mask).astype(np.float32)
    result = jitted(walk, q, levels, scatter)
    assert np.isfinite(result.tail_out).all() and np.isfinite(result.tail_lse).all()
    assert np.abs(result.tail_out).max() <= np.abs(values).max() * 1.01
    # The shift of the tail's values stays below a few standard deviations of the keys, however large query and keys are.
    from_keys = FromKeys(jnp.eye(16)[None, None] / scale)
    shift = np.asarray(jitted(walk, q, levels, scatter, from_keys=from_keys).tail_out) - np.asarray(result.tail_out)
    assert 0 < np.abs(shift).max() <= 4 * keys.std()


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_tail_moves_values_along_the_query(softcap):
    """One page of 4,096 tokens whose values are its keys: the tail is near softmax attention, the mean value is not."""
    rng = np.random.default_rng(13)
    keys = rng.standard_normal((1, 1, 1, 4096, 16)).astype(np.float32) + 1
    q = (rng.standard_normal((1, 1, 2, 16)) * 0.3).astype(np.float32)
    scoring, digests = Scoring(0.25, softcap), jitted(digest, keys, keys, np.ones((1, 1, 1, 4096), bool))
    covariance = jitted(along, q, scatter_of(keys, np.ones((1, 1, 1, 4096), bool)).astype(np.float32), scoring=scoring)
    tail = jitted(lambda q, d, x, m: tree_walk.tail_of([(score(q, d, x, scoring=scoring), d)], x, m)[0], q, digests, covariance,
                  FromKeys(jnp.eye(16)[None, None]))  # fmt: skip
    products = 0.25 * q[0, 0].astype(np.float64) @ keys[0, 0, 0].T
    weights = np.exp(products if softcap is None else softcap * np.tanh(products / softcap))
    expected = weights @ keys[0, 0, 0] / weights.sum(-1, keepdims=True)
    mean_value = keys[0, 0, 0].mean(0)
    assert np.linalg.norm(tail[0, 0] - expected) < 0.25 * np.linalg.norm(mean_value - expected)


@pytest.mark.parametrize(("group", "softcap"), [("sum", None), ("max", 2.0), ("interleave", None)])
def test_group_rules_choose_as_written(group, softcap):
    keys, values, mask = pages_of(np.random.default_rng(11), 60)
    q = np.random.default_rng(12).standard_normal((1, 1, 3, 16)).astype(np.float32) * 3
    digests = jitted(digest, keys, values, mask)
    result = jitted(
        tree_walk.walk,
        jnp.asarray(q),
        jitted(tree.build, digests),
        scatter_of(keys, mask).astype(np.float32),
        scoring=Scoring(16**-0.5, softcap),
        rules=WalkRules(opened=1, selected=7, tail=False, score="mean", group=group),
    )
    scores = jitted(score, q, digests, None, rule="mean", scoring=Scoring(16**-0.5, softcap))[0]
    scores = np.asarray(scores)[0, 0].astype(np.float64)
    for page in np.flatnonzero(mask[0, 0].any(-1)):
        page_keys = keys[0, 0, page][mask[0, 0, page]]
        expected = capped(q[0, 0] / 4 @ page_keys.mean(0), softcap) + np.log(len(page_keys))
        np.testing.assert_allclose(scores[:, page], expected, atol=1e-4)
    if group == "interleave":
        orders, expected = np.argsort(-scores, axis=-1), []
        for page in orders.T.ravel():  # the first page of every head, then the second of every head, ...
            expected += [page] if page not in expected else []
    else:
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        expected = np.argsort(-(share.sum(0) if group == "sum" else share.max(0)))
    np.testing.assert_array_equal(result.page_ids[0, 0], expected[:7])


def test_an_empty_tree_has_no_tail(small_top):
    ones = np.ones((1, 1, 600, 16, 8), np.float32)
    levels = jitted(tree_of, ones, ones, np.zeros((1, 1, 600, 16), bool))
    q, scatter = np.ones((1, 1, 1, 8), np.float32), np.zeros((1, 1, 8, 8), np.float32)
    result = jitted(tree_walk.walk, q, levels, scatter, scoring=Scoring(8**-0.5), rules=WalkRules(opened=16, selected=4))
    assert (np.asarray(result.counts) == 0).all() and (np.asarray(result.tail_lse) == -np.inf).all()
    assert (np.asarray(result.tail_out) == 0).all()
    assert np.asarray(result.page_ids).max() < 600
