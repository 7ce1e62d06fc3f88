"""The packed policy, which keeps all tokens in codes and attends exactly to the best of them, against plain numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from icejax.cache.options import make_policy
from icejax.cache.registry import Packed
from icejax.cache.sizes import CacheSpec
from icejax.checks.errors import InputError
from icejax.ops.pages import code_attention
from icejax.ops.pages.key_codes import decode_keys
from tests import tolerances
from tests.cache.test_clustered import STEPS, assert_reference
from tests.helpers import layer as harness
from tests.helpers.layer import Layer, attention, draw
from tests.reference import packed as reference

ALONE = 0.03  # relative error of all pages in 8 bits; measured at most 0.0117


@pytest.mark.slow
@pytest.mark.parametrize(("codes", "atol"), [(4, tolerances.CODES), (3, tolerances.EXACT)], ids=["4", "3"])
def test_200_steps_equal_the_reference(monkeypatch, codes, atol):
    """Codes decoded in six parts, twelve flushes and three compactions; long and short prompts."""
    monkeypatch.setattr(harness, "PROMPT", 1024)
    monkeypatch.setattr(code_attention, "LEAST", 16)
    policy = Packed(budget=64, codes=codes, compact_every=64)
    assert_reference(monkeypatch, policy, (1000, 150, 20), STEPS, levels=None, reference=reference.Packed, atol=atol)


@pytest.mark.slow
def test_rows_that_join_late_equal_the_reference(monkeypatch):
    policy = Packed(budget=48, page_size=8, compact_every=32)
    assert_reference(monkeypatch, policy, (250, 21, 7), 70, levels=None, clock=7, reference=reference.Packed)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [0, 5])
def test_fewer_exact_tokens_equal_the_reference(monkeypatch, exact):
    policy = Packed(budget=48, page_size=8, exact=exact, compact_every=0)
    assert_reference(monkeypatch, policy, (250, 21, 7), 70, levels=None, clock=7, reference=reference.Packed)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "softcap"), [((16, 16), None), ((16, 16), 2.0), ((24, 16), None)])
def test_codes_alone_are_nearly_exact_in_8_bits(sizes, softcap):
    """Steps, then a text that attends to codes, then steps; no array of the pool. In a latent layer keys hold the values."""
    latent, lengths, (first, more) = sizes[0] != sizes[1], (250, 100), (20, 40)
    prompt, new = draw(lengths, first + more + 20, kv_heads=1 if latent else harness.KV_HEADS, sizes=sizes)
    if latent:
        prompt[2], new[2] = (x[1][..., : sizes[1]] for x in (prompt, new))
    layer = Layer(Packed(budget=64, codes=8, exact=0), lengths, *prompt, latent=latent, softcap=softcap)

    def assert_near(out: np.ndarray, token: int) -> None:
        for row, length in enumerate(lengths):
            k, v = (np.concatenate([p[row, :length], n[: token + 1, row]]) for p, n in zip(prompt[1:], new[1:], strict=True))
            expected = attention(new[0][token, row], k, v, softcap)
            assert np.linalg.norm(out[row] - expected) < ALONE * np.linalg.norm(expected), (token, row)

    for token in range(first):
        assert_near(layer.step(*(x[token] for x in new)), token)
    text = layer.extend(*(x[first : first + more].swapaxes(0, 1) for x in new), (more, more))
    for token in range(more):
        assert_near(text[:, token], first + token)
    for token in range(first + more, len(new[0])):
        assert_near(layer.step(*(x[token] for x in new)), token)
    assert layer.pool == () and layer.policy.pool(layer.spec).planes == 0


@pytest.mark.slow
def test_codes_go_where_their_pages_go():
    rng, size = np.random.default_rng(0), (1, 2, 6, 8, 16)
    spec = CacheSpec(
        batch_size=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        value_dim=16,
        prompt_capacity=32,
        new_capacity=16,
        dtype="float32",
    )
    codes = Packed(page_size=8).index
    k, v = (jnp.asarray(rng.standard_normal(size), jnp.float32) for _ in range(2))
    index = codes.with_pages(codes.empty(spec, 6), codes.describe(k, v, jnp.ones(size[:-1], bool)), jnp.int32(0))
    moved = codes.after_move(index, jnp.array([5, 4]), jnp.array([True, False]), jnp.int32(2), behind=4)
    np.testing.assert_array_equal(moved.count[0, 0], [8, 8, 8, 0, 0, 0])
    for vectors, x in (("keys", k), ("values", v)):
        before, after = (np.asarray(decode_keys(getattr(y, vectors), 8, 4, "float32")) for y in (index, moved))
        np.testing.assert_array_equal(after[:, :, :3], before[:, :, [0, 1, 5]])
        assert np.abs(before - x).max() < 0.2 and not after[:, :, 3:].any()


@pytest.mark.slow
@pytest.mark.parametrize("exact", [None, 0])
def test_steps_report_an_error_that_is_near_the_true_one(exact):
    """The mean over steps: of random keys and values, whose codes are far coarser than those of a model."""
    lengths, true, estimates = (250, 200), [], []
    prompt, new = draw(lengths, 24)
    layer = Layer(Packed(budget=64, exact=exact, estimate=True), lengths, *prompt)
    for step in range(24):
        out = layer.step(*(x[step] for x in new))
        report = layer.policy.report(layer.state, layer.lengths)
        error, tokens = np.asarray(report.estimates)
        if (step + 1) % 16:  # else a page has left the window since the step
            np.testing.assert_allclose(tokens, layer.tokens[1], rtol=0, atol=tolerances.EXACT)
        for row, length in enumerate(lengths):
            k, v = (np.concatenate([p[row, :length], n[: step + 1, row]]) for p, n in zip(prompt[1:], new[1:], strict=True))
            expected = attention(new[0][step, row], k, v)
            true.append((np.linalg.norm(out[row] - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).mean())
            estimates.append(error[row])
    assert 0.9 < np.mean(estimates) / np.mean(true) < 1.5
    assert Layer(Packed(budget=64), lengths, *prompt).state.error is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(codes=1), "codes must be one of 2, 3, 4, 8, got 1"),
        (dict(codes="5"), "codes must be one of 2, 3, 4, 8, got 5"),
        (dict(budget=20), "budget must hold 5 sinks, a window of 21 and a page of 16: at least 42, got 20"),
        (dict(page_dtype="int8"), "cache 'packed' has no option 'page_dtype': expected one of budget, "),
        (dict(exact=-1), "exact must be at least 0, got -1"),
        (dict(budget=64, exact=33), "exact must be at most 32, the page tokens of budget=64, got 33"),
        (dict(opened=8), "cache 'packed' has no option 'opened': expected one of budget, "),
    ],
)
def test_what_cannot_be_packed_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        make_policy("packed", options)
