"""Forms of ops that accelerators run, here on the CPU: each op against numpy, one generated text against the CPU's forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas

import icejax
from icejax.cache.pool import host_pool
from icejax.engine.plan import make_plan
from icejax.ops import slots, topk
from icejax.ops.attention import dense
from icejax.ops.pages import digests, tree
from icejax.runtime.host_reads import backends, choose
from tests import tolerances
from tests.helpers import programs
from tests.helpers.run import jitted


@pytest.fixture
def on_gpu(monkeypatch):
    """Selects the GPU's forms on the CPU; Pallas kernels are interpreted."""

    def cuda_form(*args, default=None, **forms):
        return forms.get("cuda", default)(*args)

    monkeypatch.setattr(lax, "platform_dependent", cuda_form)
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, interpret=True))
    monkeypatch.setattr(choose, "ORDER", {"cpu": ("triton",)})
    monkeypatch.setattr(choose, "PROBED_BACKENDS", ())
    choose.fetch_backend.cache_clear()
    programs.drop()
    yield
    choose.fetch_backend.cache_clear()
    programs.drop()


def tied_scores(rows: int, size: int) -> np.ndarray:
    """Returns scores f32[rows, size] with many ties, some of them -inf."""
    scores = np.random.default_rng(size).integers(0, 7, (rows, size)).astype(np.float32)
    return np.where(scores == 0, -np.inf, scores)


@pytest.mark.parametrize("form", [topk._best_counted, topk._best_sorted], ids=["counted", "sorted"])
@pytest.mark.parametrize(("size", "wanted"), [(40, 11), (9, 9), (1, 1)])
def test_the_best_are_the_first_of_a_stable_sort(form, size, wanted):
    scores = tied_scores(6, size)
    expected = np.argsort(-scores, axis=-1, kind="stable")[:, :wanted]
    payload = np.random.default_rng(0).integers(0, 99, scores.shape)
    room = np.random.default_rng(1).integers(0, wanted + 1, (2, 3))
    score_rows, payload_rows = (jnp.asarray(x).reshape(2, 3, size) for x in (scores, payload.astype(np.int32)))
    indices, mask, (gathered,) = form(score_rows, jnp.asarray(room), payload_rows, wanted=wanted)
    np.testing.assert_array_equal(np.asarray(indices).reshape(6, wanted), expected)
    np.testing.assert_array_equal(np.asarray(gathered).reshape(6, wanted), np.take_along_axis(payload, expected, axis=-1))
    for row, count in enumerate(room.reshape(-1)):
        np.testing.assert_array_equal(np.flatnonzero(np.asarray(mask).reshape(6, size)[row]), np.sort(expected[row, :count]))


def test_values_that_are_no_numbers_come_last():
    scores = jnp.asarray([np.nan, 3.0, np.nan, 5.0])
    assert topk._best_counted(scores, jnp.asarray(4), wanted=4)[0].tolist() == [3, 1, 0, 2]


def test_the_largest_are_as_many_as_there_is_room(monkeypatch):
    scores, room = tied_scores(4, 50), np.asarray([0, 3, 17, 20], np.int32)
    scores[0, 7], scores[1, 9] = -np.inf, -0.0
    rank = np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1)
    monkeypatch.setattr(topk, "MOST_COUNTED", 49)
    for actual in (
        jitted(topk._largest_counted, scores, room),
        jitted(topk._largest_sorted, scores, room, most=20),
        jitted(topk._largest_halved, scores, room),
        jitted(topk.largest, scores.reshape(2, 2, 50), room.reshape(2, 2), most=20),
    ):
        np.testing.assert_array_equal(np.asarray(actual).reshape(4, 50), rank < room[:, None])


@pytest.mark.parametrize("form", ["by row", "scattered"])
def test_a_token_lands_in_its_row_s_slot(form, request):
    if form == "scattered":
        request.getfixturevalue("on_gpu")
    rng = np.random.default_rng(0)
    buffer, vectors = rng.random((3, 2, 5, 4), np.float32), rng.random((3, 2, 4), np.float32)
    for append, slot in ((slots.append, [4, 0, 2]), (slots.append_apart, [[4, 1], [0, 0], [2, 3]])):
        expected, slot_of_head = buffer.copy(), np.broadcast_to(np.asarray(slot).reshape(3, -1), (3, 2))
        for row, head in np.ndindex(3, 2):
            expected[row, head, slot_of_head[row, head]] = vectors[row, head]
        actual = append(jnp.asarray(buffer.reshape(6, 5, 4)), jnp.asarray(vectors), jnp.asarray(slot, jnp.int32))
        np.testing.assert_array_equal(np.asarray(actual).reshape(buffer.shape), expected)


def test_products_are_the_same_whichever_comes_first(on_gpu):
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal(shape, np.float32) for shape in ((3, 2, 4, 16), (3, 2, 9, 16)))
    for actual in (dense.products(jnp.asarray(q), jnp.asarray(k)), dense._keys_first(jnp.asarray(q), jnp.asarray(k))):
        np.testing.assert_allclose(np.asarray(actual), q @ k.swapaxes(2, 3), atol=tolerances.EXACT)


@pytest.mark.parametrize("pages", [3 * digests.PART, digests.PART + 1])
def test_values_are_the_same_sums_part_by_part(on_gpu, pages):
    rng = np.random.default_rng(0)
    weights, values = (rng.standard_normal(shape, np.float32) for shape in ((2, 3, 4, pages), (2, 3, pages, 16)))
    actual = digests._sums(jnp.asarray(weights), digests.Vectors(jnp.asarray(values), None))
    expected = weights.astype(np.float64) @ values  # fp32 sums of numpy round as much as these
    np.testing.assert_allclose(np.asarray(actual), expected, atol=tolerances.EXACT)


@pytest.mark.parametrize(
    ("dtype", "planes", "height", "size"),
    [("uint16", 2, 16, 32), ("uint32", 2, 4, 8), ("uint8", 2, 18, 128), ("uint16", 1, 4, 8)],
)
def test_kernel_copies_whole_pages_and_only_wanted_ones(on_gpu, dtype, planes, height, size):
    """The kernel copies a page in parts whose sizes are powers of two; 18 rows of 128 bytes take several."""
    table = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (9, planes, height, size), dtype=dtype)
    pages, wanted = np.asarray([8, 0, 3, 3]), np.asarray([True, False, False, True])
    copied = backends._triton(jnp.asarray(table), jnp.asarray(pages, jnp.int32), jnp.asarray(wanted))
    np.testing.assert_array_equal(np.stack(copied, axis=1), np.where(wanted[:, None, None, None], table[pages], 0))
    assert sum(part.size for part in backends._parts(height * size)) == height * size


@pytest.mark.parametrize("planes", [1, 2])
def test_the_kernel_copies_single_slots_of_rows_that_go_on(on_gpu, planes):
    pool = np.random.default_rng(0).random((3, 2, host_pool.EXTENT, 1, planes, 4, 24), np.float32)
    ids, ended = np.asarray([[[19, 0, 7]], [[3, 3, 12]]], np.int32), jnp.asarray([False, True])
    table = jnp.asarray([[2], [0]], jnp.int32)
    layer = host_pool.PoolLayer(jnp.asarray(pool.view(np.uint32)), table, ended, 1, "triton", "float32", single_slots=True)
    fetched, count = layer.fetch_live(jnp.asarray(ids), jnp.asarray(ids != 0))
    expected = pool[2, 1, ids[0, 0] // 4, 0, :, ids[0, 0] % 4] * (ids[0, 0] != 0)[:, None, None]
    np.testing.assert_array_equal(np.stack(fetched, axis=3)[0, 0, :, :, 0], expected)
    assert count.tolist() == [2, 0] and not np.stack(fetched)[:, 1].any()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"resident": True, "page_dtype": "int8"}], ids=str)
def test_a_text_is_the_same(request, bundled, options):
    """Two rows of unequal length; the longer one moves a page from its window to the pool."""
    model, tokenizer = bundled
    texts = ("Once upon a time there was a lighthouse. " * 12, "One more time. " * 30)
    prompts = [icejax.Request(prompt=text, max_new_tokens=limit) for text, limit in zip(texts, (4, 14), strict=True)]
    settings = dict(cache=icejax.Clustered(budget=64, page_size=8, **options))
    expected = [row.token_ids for row in icejax.generate(model, tokenizer, prompts, **settings)]
    request.getfixturevalue("on_gpu")
    token_ids = [row.token_ids for row in icejax.generate(model, tokenizer, prompts, **settings)]
    assert token_ids == expected and [len(ids) for ids in token_ids] == [4, 14]


def test_long_caches_have_sizes_that_a_gpu_divides(bundled):
    model = bundled[0]
    plans = [
        make_plan(model, icejax.Full(), batch_size=1, prompt_tokens=tokens, new_tokens=300, platform="gpu")
        for tokens in (16000, 20000, 100)
    ]
    assert [plan.spec.capacity for plan in plans] == [16384 + 1024, 24576 + 1024, 256 + 384]


@pytest.mark.parametrize(("pages", "expected"), [(500, 500), (513, 576), (8192 + 64, 1088)])
def test_the_highest_level_of_a_large_tree_has_whole_64s(pages, expected):
    levels = jax.eval_shape(lambda: tree.build(digests.empty((1, 1, pages), 4, 4, "float32")))
    assert levels[-1].count.shape[-1] == expected


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_plan_for_a_platform_that_is_not_here_tries_nothing(bundled, monkeypatch, platform):
    monkeypatch.setattr(choose, "backend_error", None)
    sizes = dict(batch_size=1, prompt_tokens=300, new_tokens=9)
    plan = make_plan(bundled[0], icejax.Clustered(), platform=platform, **sizes)
    assert (plan.fetch_backend, plan.platform) == (choose.ORDER[platform][0], platform)
    int8 = icejax.Clustered(page_dtype="int8")
    if platform == "tpu":
        with pytest.raises(icejax.InputError, match="page_dtype=int8 does not compile on TPU: leave it out"):
            make_plan(bundled[0], int8, platform=platform, **sizes)
    else:
        assert make_plan(bundled[0], int8, platform=platform, **sizes).pool_dtype == "int8"
