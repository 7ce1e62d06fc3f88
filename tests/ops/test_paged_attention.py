"""Attention over fetched pages against float64: the exact tokens, the other tokens of their pages, and the tail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icejax.ops.attention.dense import Attended, Scoring
from icejax.ops.pages.paged_attention import attend_beside, attend_paged, attend_whole
from tests import tolerances
from tests.helpers.dense import capped
from tests.helpers.run import jitted

SIZE, GROUP, PAGES, SLOTS = 16, 2, 5, 8


def draw(seed: int, scale: float = 1.0, wide: int = SIZE):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((1, GROUP, SIZE)) * scale
    resident = [rng.standard_normal((1, 6, size)) for size in (SIZE, wide)]
    pages = [rng.standard_normal((1, PAGES, SLOTS, size)) for size in (SIZE, wide)]
    counts = rng.integers(0, SLOTS + 1, (1, PAGES))
    slots = np.arange(SLOTS)[None, None, :] < counts[..., None]
    unfetched = rng.standard_normal((1, GROUP, wide)), rng.standard_normal((1, GROUP))
    return q, resident, np.asarray([[True] * 4 + [False] * 2]), pages, slots, unfetched


def float64(q, resident, mask, pages, slots, unfetched, room: int, tail: bool, softcap: float | None = None):
    """Returns output and log-sum-exp, summed over a list of (logits, value), and the weights of the pages' exact tokens."""
    logit = lambda k: capped(q[0] @ k / SIZE**0.5, softcap)  # noqa: E731
    resident_tokens = [(logit(k), v) for k, v, m in zip(resident[0][0], resident[1][0], mask[0], strict=True) if m]
    tokens = [(logit(pages[0][0, m, s]), pages[1][0, m, s], m) for m in range(PAGES) for s in range(SLOTS) if slots[0, m, s]]
    all_logits = np.stack([x for x, *_ in resident_tokens + tokens] + ([unfetched[1][0]] if tail else []))
    total = np.exp(all_logits - all_logits.max(0)).sum(0)
    token_weights = [(np.exp(x - all_logits.max(0)) / total).sum() for x, _, _ in tokens]
    order = np.argsort(-np.asarray(token_weights))
    exact = set(order[:room].tolist())
    parts = resident_tokens + [tokens[i][:2] for i in exact]
    if tail:
        parts.append((unfetched[1][0], unfetched[0][0]))
        for m in range(PAGES):
            approximated = [tokens[i] for i in range(len(tokens)) if i not in exact and tokens[i][2] == m]
            if approximated:
                parts.append(
                    (np.logaddexp.reduce([x for x, *_ in approximated]), np.mean([v for _, v, _ in approximated], axis=0))
                )
    logits = np.stack([x for x, _ in parts])  # parts, heads
    weights = np.exp(logits - logits.max(0))
    values = np.stack([np.broadcast_to(v, (GROUP, v.shape[-1])) for _, v in parts])
    out = (weights[..., None] * values).sum(0) / weights.sum(0)[:, None]
    return out, np.log(weights.sum(0)) + logits.max(0), {i: token_weights[i] for i in exact}


def run(q, resident, mask, pages, slots, unfetched, room: int, tail: bool, softcap: float | None = None, dtype="float32"):
    cast = lambda x: jnp.asarray(x, dtype)  # noqa: E731
    pages = (*map(cast, pages), slots)
    unfetched = tuple(x.astype(np.float32) for x in unfetched)
    return ATTEND(
        cast(q),
        (*map(cast, resident), mask),
        pages,
        unfetched,
        scoring=Scoring(SIZE**-0.5, softcap),
        room=np.asarray([room], np.int32),
        most=12,
        tail=tail,
    )


ATTEND = jax.jit(attend_paged, static_argnames=("scoring", "most", "tail"))


@pytest.mark.parametrize("room", [0, 5, 12])
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize(("seed", "wide", "softcap"), [(0, SIZE, None), (1, 12, None), (2, 20, None), (3, SIZE, 1.0)])
def test_equals_float64(seed, wide, softcap, tail, room):
    inputs = draw(seed, wide=wide)
    expected, lse, exact_weights = float64(*inputs, room, tail, softcap)
    inputs[3][0][~inputs[4]], inputs[3][1][~inputs[4]] = np.nan, 1e6  # empty slots do not count
    actual, weights, _ = run(*inputs, room, tail, softcap)
    np.testing.assert_allclose(actual.out[0], expected, rtol=0, atol=tolerances.EXACT)
    np.testing.assert_allclose(actual.lse[0], lse, rtol=0, atol=tolerances.EXACT)
    assert (np.asarray(weights) > 0).sum() == min(room, inputs[4].sum())
    np.testing.assert_allclose(sorted(np.asarray(weights)[np.asarray(weights) > 0]), sorted(exact_weights.values()), atol=1e-5)


@pytest.mark.parametrize(("heads", "wide", "softcap"), [(GROUP, SIZE, None), (1, 12, None), (0, 20, None), (1, SIZE, 1.0)])
def test_whole_pages_equal_float64(heads, wide, softcap):
    """Pages have a bias per query head, one for all heads, or none; it is added after the soft cap, and -inf hides a page."""
    q, resident, mask, pages, slots, _ = draw(3, wide=wide)
    rng = np.random.default_rng(0)
    bias = np.where(rng.random((1, heads, PAGES)) < 0.3, -np.inf, rng.standard_normal((1, heads, PAGES))) if heads else None
    logits = np.einsum("gh,sh->gs", q[0], np.concatenate([resident[0][0], pages[0].reshape(-1, SIZE)])) / SIZE**0.5
    logits = capped(logits, softcap)
    logits = np.where(np.concatenate([mask[0], slots.reshape(-1)]), logits, -np.inf)
    logits[:, 6:] += 0 if bias is None else np.repeat(bias[0], SLOTS, axis=1)
    lse = np.log(np.exp(logits).sum(1))
    weights = np.exp(logits - lse[:, None])
    expected = weights @ np.concatenate([resident[1][0], pages[1].reshape(-1, wide)])
    pages[0][~slots] = np.nan
    arrays = jax.tree.map(lambda x: jnp.asarray(x, "float32"), (q, tuple(resident), tuple(pages), bias))
    scoring = Scoring(SIZE**-0.5, softcap)
    actual, slot_weights = jitted(attend_whole, arrays[0], (*arrays[1], mask), (*arrays[2], slots), arrays[3], scoring=scoring)
    np.testing.assert_allclose(actual.out[0], expected, rtol=0, atol=tolerances.EXACT)
    np.testing.assert_allclose(actual.lse[0], lse, rtol=0, atol=tolerances.EXACT)
    np.testing.assert_allclose(slot_weights[0], weights[:, 6:].sum(0).reshape(PAGES, SLOTS), rtol=0, atol=tolerances.EXACT)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_half_precision_is_finite_and_near(dtype, scale):
    inputs = draw(5, scale)
    expected, *_ = float64(*inputs, 12, True)
    actual, *_ = run(*inputs, 12, True, dtype=dtype)
    assert np.isfinite(np.asarray(actual.out)).all()
    if scale == 1.0:
        np.testing.assert_allclose(actual.out[0], expected, atol=0.03)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_tokens_beside_a_rest_equal_numpy(softcap):
    """Of the second row no slot has a token: the rest alone is left, and no NaN."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(x) for x in ((2, GROUP, SIZE), (2, 9, SIZE), (2, 9, 8)))
    mask, rest = (
        np.array([[True] * 7 + [False] * 2, [False] * 9]),
        [rng.standard_normal(x) for x in ((2, GROUP, 8), (2, GROUP))],
    )
    cast = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    parts = map(cast, (q, np.where(mask[..., None], k, np.nan), v))
    beside = *parts, jnp.asarray(mask), Attended(*map(cast, rest))
    attended, weights = jitted(attend_beside, *beside, scoring=Scoring(0.25, softcap))
    scores = np.concatenate([capped(0.25 * q[0] @ k[0, :7].T, softcap), rest[1][0][:, None]], axis=1)
    lse = np.logaddexp.reduce(scores, axis=1)
    shares = np.exp(scores - lse[:, None])
    np.testing.assert_allclose(attended.lse[0], lse, rtol=0, atol=tolerances.EXACT)
    np.testing.assert_allclose(
        attended.out[0], shares[:, :7] @ v[0, :7] + shares[:, 7:] * rest[0][0], rtol=0, atol=tolerances.EXACT
    )
    np.testing.assert_allclose(weights[0], [*shares[:, :7].sum(0), 0, 0], rtol=0, atol=tolerances.EXACT)
    for actual, expected in zip(attended, rest, strict=True):
        np.testing.assert_allclose(actual[1], expected[1], rtol=0, atol=tolerances.EXACT)
    assert not np.asarray(weights[1]).any()
