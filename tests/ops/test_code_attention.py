"""Attention to pages in codes, decoded in parts, against plain numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icejax.ops.attention.dense import Attended, Scoring
from icejax.ops.pages import code_attention
from icejax.ops.pages.key_codes import decode_keys
from tests import tolerances
from tests.helpers.run import jitted
from tests.reference import packed as reference

B, K, G, P, SLOTS, SIZE = 2, 2, 3, 13, 8, 16


def drawn(*, latent: bool = False):
    """Returns queries, keys, values, a mask with partial and empty pages, and the attention to the tokens outside."""
    rng = np.random.default_rng(3)
    q = 1.5 * rng.standard_normal((B, K, G, SIZE)).astype(np.float32)
    k = rng.standard_normal((B, K, P, SLOTS, SIZE)).astype(np.float32)
    mask = np.arange(SLOTS) < rng.integers(0, SLOTS + 1, (B, K, P, 1))
    v = None if latent else rng.standard_normal((B, K, P, SLOTS, SIZE - 4)).astype(np.float32)
    k, v = (None if x is None else np.where(mask[..., None], x, np.nan) for x in (k, v))
    lse, out = 3 * rng.standard_normal((B, K, G)), rng.standard_normal((B, K, G, SIZE - 4))
    return q, k, v, mask, Attended(*(x.astype(np.float32) for x in (out, lse)))


def merged(out, lse, outside: Attended) -> tuple[np.ndarray, np.ndarray]:
    """Returns output and log-sum-exp [G] of the rest of the pages together with the tokens outside."""
    total = np.logaddexp(lse, outside.lse.astype(np.float64))
    shares = (np.exp(x - np.where(np.isneginf(total), 0, total))[:, None] for x in (lse, outside.lse))
    return next(shares) * out + next(shares) * outside.out, total


def attend(q, k, v, mask, outside, *, scoring: Scoring, wanted: int, dtype: str = "float32", **more):
    """Returns the pages and the attention to them; `more` are further arguments of `attend_codes`."""
    q, k, v = (None if x is None else x.astype(jnp.dtype(dtype)) for x in (q, k, v))
    pages = jitted(code_attention.encode_pages, k, v, mask, bits=4)
    options = dict(scoring=scoring, page_size=SLOTS, bits=4, wanted=wanted)
    return pages, jitted(code_attention.attend_codes, q, pages, outside, **options, **more)


def decode(codes) -> np.ndarray:
    """Returns the decoded vectors f64[B, K, P, p, _]."""
    return np.asarray(jitted(decode_keys, codes, page_size=SLOTS, bits=4, dtype="float32"), np.float64)


@pytest.mark.parametrize("wanted", [20, pytest.param(P * SLOTS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("softcap", "latent"),
    [(None, False), pytest.param(2.0, False, marks=pytest.mark.slow), pytest.param(None, True, marks=pytest.mark.slow)],
    ids=["plain", "capped", "latent"],
)
def test_the_best_tokens_and_the_rest_equal_numpy(monkeypatch, softcap, latent, wanted):
    """In three parts; of 104 slots the rest may be empty. In a latent layer keys hold the values."""
    monkeypatch.setattr(code_attention, "LEAST", 5)
    q, k, v, mask, outside = drawn(latent=latent)
    scoring = Scoring(SIZE**-0.5, softcap)
    pages, tokens = attend(q, k, v, mask, outside, scoring=scoring, wanted=wanted)
    pages, tokens = jax.tree.map(np.asarray, (pages, tokens))
    keys = decode(pages.keys)
    values = keys if latent else decode(pages.values)
    for row in np.ndindex(B, K):
        there = np.flatnonzero(mask[row])
        scores = q[row] @ keys[row].reshape(-1, SIZE)[there].T * scoring.scale
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        near = jax.tree.map(lambda x: x[row], outside)  # noqa: B023  called at once
        best, out, lse = reference.rest(scores, near.lse, values[row].reshape(P * SLOTS, -1)[there, : SIZE - 4], wanted)
        out, lse = merged(out, lse, near)
        np.testing.assert_array_equal(np.asarray(tokens.counts[row]), np.arange(wanted) < len(best))
        np.testing.assert_array_equal(np.asarray(tokens.ids[row])[: len(best)], there[best])
        np.testing.assert_allclose(tokens.rest.out[row], out, rtol=0, atol=tolerances.EXACT)
        np.testing.assert_allclose(tokens.rest.lse[row], lse, rtol=0, atol=tolerances.EXACT)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["tokens", "pages"])
def test_a_guess_chooses_tokens_or_pages(monkeypatch, whole):
    """The attention to the rest is that of the true queries; pages are chosen by the sum over their tokens."""
    monkeypatch.setattr(code_attention, "LEAST", 5)
    (q, k, v, mask, outside), wanted = drawn(), 4 if whole else 20
    guess = np.random.default_rng(4).standard_normal(q.shape).astype(np.float32)
    pages, tokens = attend(q, k, v, mask, outside, scoring=Scoring(0.25), wanted=wanted, guess=jnp.asarray(guess), whole=whole)
    decoded = decode(pages.keys), decode(pages.values)
    for row in np.ndindex(B, K):
        (keys, values), slots = (x[row].reshape(P * SLOTS, -1) for x in decoded), mask[row].reshape(-1)
        scores, guessed = (np.where(slots, 0.25 * x[row] @ keys.T, -np.inf) for x in (q, guess))
        total = np.logaddexp(np.logaddexp.reduce(guessed, axis=1), outside.lse[row])
        worth = np.exp(guessed - total[:, None]).sum(0).reshape(-1, SLOTS if whole else 1).sum(1)
        best, unit = np.argsort(-worth, kind="stable")[:wanted], SLOTS if whole else 1
        np.testing.assert_array_equal(tokens.ids[row], best)
        np.testing.assert_array_equal(tokens.counts[row], slots.reshape(-1, unit).sum(1)[best])
        others = slots & ~np.isin(np.arange(P * SLOTS) // unit, best)
        lse = np.logaddexp.reduce(scores[:, others], axis=1)
        expected = np.exp(scores[:, others] - lse[:, None]) @ values[others]
        expected, lse = merged(expected, lse, Attended(outside.out[row], outside.lse[row]))
        np.testing.assert_allclose(tokens.rest.lse[row], lse, rtol=0, atol=tolerances.EXACT)
        np.testing.assert_allclose(tokens.rest.out[row], expected, rtol=0, atol=tolerances.EXACT)


def test_a_row_without_tokens_has_what_is_outside_alone():
    """And nothing, without NaN, if nothing is outside either."""
    q, k, v, mask, outside = drawn()
    mask[0], outside.lse[0, 0] = False, -np.inf
    _, tokens = attend(q, k, v, mask, outside, scoring=Scoring(0.25), wanted=20)
    assert not np.asarray(tokens.counts[0]).any()
    assert np.isneginf(tokens.rest.lse[0, 0]).all() and not np.asarray(tokens.rest.out[0, 0]).any()
    np.testing.assert_allclose(tokens.rest.out[0, 1], outside.out[0, 1], rtol=0, atol=tolerances.EXACT)
    np.testing.assert_allclose(tokens.rest.lse[0, 1], outside.lse[0, 1], rtol=0, atol=tolerances.EXACT)


@pytest.mark.slow
def test_bf16_decodes_and_attends_in_bf16():
    q, k, v, mask, outside = drawn()
    exact, half = (
        attend(q, k, v, mask, outside, scoring=Scoring(0.25), wanted=20, dtype=x)[1] for x in ("float32", "bfloat16")
    )
    assert half.rest.out.dtype == jnp.float32
    same = [len({*a} & {*b}) for a, b in zip(*(np.asarray(x.ids).reshape(-1, 20).tolist() for x in (exact, half)), strict=True)]
    assert min(same) >= 19  # the last of the best may change
    np.testing.assert_allclose(half.rest.lse, exact.rest.lse, rtol=0, atol=0.1)


def test_no_part_decodes_all_pages(monkeypatch):
    monkeypatch.setattr(code_attention, "LEAST", 5)
    assert code_attention._parts(13) == [slice(0, 5), slice(5, 10), slice(10, 13)]
    assert code_attention._parts(800) == [slice(first, first + 100) for first in range(0, 800, 100)]
    q, k, v, mask, outside = drawn()
    pages = jax.eval_shape(functools.partial(code_attention.encode_pages, bits=4), k, v, mask)
    step = functools.partial(code_attention.attend_codes, scoring=Scoring(0.25), page_size=SLOTS, bits=4, wanted=20)
    outputs = [x.aval for eqn in jax.make_jaxpr(step)(q, pages, outside).eqns for x in eqn.outvars]
    assert max(x.size for x in outputs if x.dtype == jnp.float32) <= 5 * B * K * SLOTS * SIZE
