"""Page formats of the pool: int8 pages are within half a step of each channel's scale, and sessions keep their bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import icejax
from icejax.cache.pool import allocation, host_pool, page_format
from icejax.cache.registry import Clustered
from icejax.runtime.host_reads import choose
from tests.helpers.documents import document

SHAPE = (5, 2, 1, 3, 2, 16, 24)  # P, L, B, K, 2, p, H
TABLE = jnp.zeros((1, 1), jnp.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_int8_pages_are_within_half_a_step(dtype):
    rng = np.random.default_rng(0)
    # Like those of keys, channels differ much in size; one page is empty.
    values = rng.standard_normal(SHAPE) * 10.0 ** rng.integers(-3, 3, (1, 1, 1, 1, 1, 1, 24))
    values[2] = 0
    pages = jnp.asarray(values, dtype)
    pool = allocation.allocate((1, 2, host_pool.EXTENT, 3, 2, page_format.page_rows(16, "int8"), 24), "int8")
    assert pool.dtype == np.uint8
    pool = host_pool.write_pages(pool, pages, TABLE, 0)
    assert pool.shape[-2:] == (18, 24)
    ids = jnp.asarray(rng.integers(0, 5, (1, 3, 4)), jnp.int32)
    layer = host_pool.PoolLayer(pool, TABLE, None, 1, choose.ORDER["cpu"][0], dtype)
    fetched = jax.jit(lambda layer: jnp.stack(layer.fetch(ids)))(layer)
    expected = np.asarray(pages, np.float64)
    for index in np.ndindex(ids.shape):
        page = expected[ids[index], 1, index[0], index[1]]
        step = np.abs(page).max(1, keepdims=True) / 127
        # Half a step of a scale rounded to eight bits, and the rounding of the result; the largest numbers may be clipped.
        clipped = np.maximum(np.abs(page) - step * 127 * (1 - 2.0**-8), 0)
        atol = step * 0.5 * (1 + 2.0**-8) + clipped + np.abs(page) * float(jnp.finfo(dtype).eps)
        assert (np.abs(np.asarray(fetched, np.float64)[(slice(None), *index)] - page) <= atol).all()
    empty_page = jax.jit(lambda layer: layer.run(jnp.int32(2), 1))(layer)
    np.testing.assert_array_equal(np.asarray(empty_page, np.float32), 0)


@pytest.mark.slow
def test_the_bundled_model_answers_from_int8_pages(bundled):
    model, tokenizer = bundled
    text, questions = document()
    options = dict(max_new_tokens=8)
    exact, int8 = (
        icejax.generate(model, tokenizer, text + questions[0].text, cache=Clustered(budget=64, page_dtype=dtype), **options)[0]
        for dtype in (None, "int8")
    )
    assert int8.text == exact.text == questions[0].answer
    assert int8.run.host_kv_bytes == exact.run.host_kv_bytes * 18 // (16 * 4)


@pytest.mark.slow
def test_sessions_keep_int8_pages_bit_for_bit(bundled, tmp_path):
    text, questions = document()
    session = icejax.Session(*bundled, cache=Clustered(budget=64, page_dtype="int8", compact_every=32), context_length=3000)
    session.ask(text, max_new_tokens=70)
    session.save(tmp_path / "kept")
    loaded = icejax.Session.load(tmp_path / "kept", *bundled)
    assert loaded._cache.run.pool.dtype == np.uint8
    for question in questions[:2]:
        assert session.ask(question.text).token_ids == loaded.ask(question.text).token_ids
