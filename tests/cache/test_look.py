"""The clustered policy that looks in codes, against plain numpy; what codes cost; and what does not go with them."""

import jax
import numpy as np
import pytest

from icejax.cache.options import make_policy
from icejax.cache.pool.page_format import pool_bytes, pool_shapes
from icejax.cache.registry import Clustered
from icejax.cache.sizes import CacheSpec
from icejax.checks.errors import InputError
from icejax.engine.plan import make_plan
from icejax.engine.serving.prefix_cache import divided
from icejax.ops.pages.code_attention import encode_pages
from icejax.ops.pages.code_bytes import PageBytes
from tests.cache.test_clustered import STEPS, assert_reference
from tests.helpers import layer as harness
from tests.helpers.layer import Layer, attention, draw
from tests.helpers.run import jitted
from tests.reference import looked as reference

LOOKED = 0.02  # relative error of a look at all pages in 8 bits; measured at most 0.0069


@pytest.mark.slow
@pytest.mark.parametrize("look", [4, 3])
def test_200_steps_equal_the_reference(monkeypatch, look):
    """Two levels of nodes above the pages, twelve flushes and three compactions; long and short prompts."""
    monkeypatch.setattr(harness, "PROMPT", 4096)
    policy = Clustered(budget=64, candidates=4, opened=4, compact_every=64, look=look, looked=24)
    assert_reference(monkeypatch, policy, (4000, 150, 20), STEPS, levels=3, reference=reference.Looked)


@pytest.mark.slow
@pytest.mark.parametrize("clock", [0, 7])
def test_short_rows_and_late_ones_equal_the_reference(monkeypatch, clock):
    policy = Clustered(budget=48, page_size=8, candidates=1, opened=4, compact_every=32, look=4, looked=8)
    assert_reference(monkeypatch, policy, (250, 21), 70, levels=2, clock=clock, reference=reference.Looked)


def test_as_many_pages_are_looked_at_as_bring_the_bytes_of_today():
    """16-bit heads of 64: keys of 112 pages and 192 values bring 254 kB; pages in 4 bits bring 1,296 bytes, a token 256."""
    for look, pages in ((2, 277), (3, 209), (4, 167), (8, 93)):
        policy = Clustered(look=look)
        codes = policy.pool(spec()).codes
        pool = pool_shapes((1, 1, 64, 1, 2, 16, 64), "bfloat16", codes)
        assert policy.reads.num_selected(10_000, pool) == pages
        assert policy.reads.num_selected(50, pool) == 50
        assert pages * codes + 192 * 256 <= 1.05 * (112 * 16 * 128 + 192 * 128) < (pages + 1) * codes + 192 * 256
    assert Clustered(look=4, looked=20).reads.num_selected(10_000, pool) == 20


def spec(**sizes) -> CacheSpec:
    shape = dict(batch_size=1, num_heads=2, num_kv_heads=1, head_dim=64, value_dim=64, prompt_capacity=256, new_capacity=64)
    return CacheSpec(**shape | dict(dtype="bfloat16") | sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "softcap"),
    [
        ((16, 16), None),
        pytest.param((16, 16), 2.0, marks=pytest.mark.slow),
        pytest.param((24, 16), None, marks=pytest.mark.slow),
    ],
    ids=["plain", "softcap", "latent"],
)
def test_a_look_at_all_pages_is_nearly_exact(sizes, softcap):
    """In 8 bits; in a latent layer the first channels of the keys are the values, and in one plane there are codes of keys."""
    latent, lengths = sizes[0] != sizes[1], (250, 100)
    prompt, new = draw(lengths, 40, kv_heads=1 if latent else harness.KV_HEADS, sizes=sizes)
    if latent:
        prompt[2], new[2] = (x[1][..., : sizes[1]] for x in (prompt, new))
    policy = Clustered(budget=64, look=8, looked=100, compact_every=32)
    layer = Layer(policy, lengths, *prompt, latent=latent, softcap=softcap)
    planes, page = layer.pool.pages.shape[4], layer.pool.codes.shape[-1]
    assert (planes, page) == ((1, 16 * 24 + 2 * 24 + 8) if latent else (2, 2 * (16 * 16 + 2 * 16 + 8)))
    for step in range(40):
        out = layer.step(*(x[step] for x in new))
        for row, length in enumerate(lengths):
            k, v = (np.concatenate([p[row, :length], n[: step + 1, row]]) for p, n in zip(prompt[1:], new[1:], strict=True))
            expected = attention(new[0][step, row], k, v, softcap)
            assert np.linalg.norm(out[row] - expected) < LOOKED * np.linalg.norm(expected), (step, row)


@pytest.mark.parametrize("sizes", [pytest.param((21, 21), marks=pytest.mark.slow), (16, 8), (24,)], ids=str)
@pytest.mark.parametrize("bits", [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow), 4, 8])
def test_codes_come_back_from_their_bytes(bits, sizes):
    rng = np.random.default_rng(0)
    k, *v = (rng.standard_normal((2, 3, 5, 8, size)).astype(np.float32) for size in sizes)
    v, mask = v[0] if v else None, np.arange(8) < rng.integers(0, 9, (2, 3, 5, 1))
    coded = jax.tree.map(np.asarray, jitted(encode_pages, k, v, mask, bits=bits))
    page_bytes = PageBytes(8, sizes, bits)
    data = np.asarray(jitted(page_bytes.write, k, v, mask))
    assert data.shape == (2, 3, 5, page_bytes.count)
    anything = np.where(mask.any(-1)[..., None], data, np.uint8(255))  # of a page without a token
    read = jax.tree.map(np.asarray, jitted(page_bytes.read, anything, coded.count))
    assert jax.tree.structure(read) == jax.tree.structure(coded)
    for x, y in zip(jax.tree.leaves(read), jax.tree.leaves(coded), strict=True):
        filled = coded.count > 0
        np.testing.assert_array_equal(x[filled], y[filled])
        assert x.dtype == y.dtype and not x[~filled].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(look=5), "look must be one of None, 2, 3, 4, 8, got 5"),
        (dict(look=4, rerank="false"), "look=4 needs rerank=true, got False: leave look out"),
        (dict(look=4, tail="false"), "look=4 needs tail=true, got False: leave look out"),
        (dict(look=4, resident="true"), "look=4 needs resident=false, got True: leave look out"),
        (dict(look=4, page_dtype="int8"), "look=4 needs page_dtype=none, got 'int8': leave look out"),
        (dict(look=4, keys_first="true"), "keys_first=true needs look=none, got 4: leave keys_first out"),
        (dict(looked=40), "looked=40 needs look, the bits of the codes: set look=4, or leave looked out"),
        (dict(look=4, looked=11), "looked must be at least 12, whose tokens fill the budget, got 11"),
    ],
)
def test_what_does_not_go_with_codes_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        make_policy("clustered", options)


def test_a_look_in_codes_is_refused_on_tpu():
    with pytest.raises(InputError, match="look=4 is not possible on TPU, which cannot fetch single tokens: leave look out"):
        Clustered(look=4).for_platform("tpu", latent=False)


def test_the_pool_of_a_plan_counts_the_codes(bundled):
    """16 keys and values of 64 channels: 8,192 bytes in fp32, and 1,296 of codes."""
    sizes = dict(batch_size=1, prompt_tokens=300, new_tokens=20)
    plan, today = (make_plan(bundled[0], Clustered(look=look), **sizes) for look in (4, None))
    codes, pages = (pool_bytes(pool_shapes(*x.pool_sizes(3))) for x in (plan, today))
    assert codes / pages == (8192 + 1296) / 8192
    assert divided(plan, codes)[0] == 2 and divided(today, pages)[0] == 2  # three quarters of three extents
