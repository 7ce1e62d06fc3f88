"""`bench.attention.two_precisions`: errors and bytes against plain numpy, on a small layer."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from bench.attention import code_errors, code_reads, coded_attention, paged, two_precisions
from bench.attention.capture import Captured
from bench.attention.coded_attention import Coding
from bench.attention.methods import RERANKED, form, residents
from bench.attention.page_attention import index_of, select
from icejax.ops.pages import key_codes
from tests.ops import test_key_codes

HEADS, GROUP, SIZE, TOKENS = 2, 2, 32, 700


@pytest.fixture(scope="module")
def layer() -> Captured:
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((HEADS, TOKENS, SIZE)).astype(np.float32) for _ in range(2))
    q = 2 * rng.standard_normal((3, HEADS * GROUP, SIZE)).astype(np.float32)
    return Captured(*map(jnp.asarray, (q, k, v)), layer=0, guess=None)


def attention(q, k, v):
    """Returns attention of [G, H] to [S, H], and its weights."""
    scores = q @ k.T / np.sqrt(SIZE)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights @ v, weights


def mean_error(layer: Captured, heads_of) -> float:
    """Returns the mean relative error of attention to the keys and values that `heads_of` returns for a query and a head."""
    errors = []
    for step in np.asarray(layer.q).reshape(-1, HEADS, GROUP, SIZE):
        for head, q in enumerate(step):
            expected = attention(q, np.asarray(layer.k[head]), np.asarray(layer.v[head]))[0]
            actual = attention(q, *heads_of(q, head))[0]
            errors.append(np.linalg.norm(actual - expected, axis=-1) / np.linalg.norm(expected, axis=-1))
    return float(np.mean(errors))


@pytest.mark.slow
def test_policies_are_measured_on_a_model_and_full_has_no_error(bundled):
    ids, layers = list(range(3, 203)), [0, 1, 2, 3]
    rows = list(two_precisions.policy_rows(bundled[0], ["full", "q8_0", "q4_0", "kivi:residual=32"], ids, 194, layers))
    full, *others = (row["error"] for row in rows)
    assert full == 0 and 0 < others[0] < others[2] < others[1] < 0.5
    size = bundled[0].config.head_dim
    assert [row["device_bytes"] for row in rows[:3]] == [4 * size, 2 * size * 34 / 32, 2 * size * 18 / 32]


@pytest.mark.parametrize("by_token", [False, True])
def test_errors_and_bytes_equal_plain_numpy(layer, by_token):
    coding = Coding(4, 4, "bfloat16", by_token, False)
    rows = list(two_precisions.rows([layer], budgets=[64], pages=[10**6], codings=[coding]))
    sinks, window = residents(64)
    k, v, mask = (np.asarray(x)[0] for x in form(layer, paged.FORMATION, 16, sinks, window))
    ones = jnp.asarray(mask[None])
    keys = key_codes.decode_keys(key_codes.encode_keys(jnp.asarray(k[None]), ones, 4, "bfloat16"), 16, 4, "float32")
    if by_token:
        values = coded_attention.decode_by_token(
            coded_attention.encode_by_token(jnp.asarray(v[None]), ones, 4, "bfloat16"), SIZE, 4, "float32"
        )
    else:
        values = key_codes.decode_keys(key_codes.encode_keys(jnp.asarray(v[None]), ones, 4, "bfloat16"), 16, 4, "float32")
    keys, values = np.asarray(keys)[0], np.asarray(values.astype("float32"))[0]
    near = [np.concatenate([np.asarray(x)[:, :sinks], np.asarray(x)[:, TOKENS - window :]], axis=1) for x in (layer.k, layer.v)]

    def with_exact(wanted):
        def heads_of(q, head):
            true = [np.concatenate([n[head], x[head][mask[head]]]) for n, x in zip(near, (k, v), strict=True)]
            coded = [np.concatenate([n[head], x[head][mask[head]]]) for n, x in zip(near, (keys, values), strict=True)]
            worth = attention(q, *coded)[1].sum(0)
            worth[: sinks + window] = -1
            best = np.argsort(-worth)[:wanted]
            for exact, x in zip(true, coded, strict=True):
                x[best] = exact[best]
            return coded

        return heads_of

    page_bytes = 16 * SIZE // 2 * 2 + 4 * SIZE + (4 * 16 if by_token else 4 * SIZE)
    pages = mask.shape[1]
    by_form = {(row["form"], row.get("exact")): row for row in rows}
    for name, wanted in (("look", 32), ("packed", 0), ("packed", 64), ("packed", 192)):
        row = by_form[name, wanted]
        assert row["error"] == pytest.approx(mean_error(layer, with_exact(wanted)), rel=0.01, abs=2e-5)
        assert row["bus_bytes"] == 4 * SIZE * wanted + (pages * page_bytes if name == "look" else 0)
    assert by_form["packed", 0]["host_bytes"] == 0 and by_form["packed", 0]["device_bytes"] == page_bytes / 16
    assert by_form["look", 32]["host_bytes"] == 4 * SIZE + page_bytes / 16
    assert by_form["today", 32]["bus_bytes"] == pages * 16 * 2 * SIZE + 32 * 2 * SIZE
    assert by_form["look", 32]["error"] < by_form["today", 32]["error"]


def test_peers_round_as_their_papers_say(layer):
    def blocks(x, codes_of):
        return np.concatenate([codes_of(x[:, i : i + 32]) for i in range(0, SIZE, 32)], axis=1)

    def q8(x):
        scale = np.abs(x).max(1, keepdims=True) / 127
        return np.round(x / scale) * scale.astype(np.float16)

    def q4(x):
        largest = x[np.arange(len(x)), np.abs(x).argmax(1)][:, None]
        scale = largest / -8
        return (np.minimum(15, np.floor(x / scale + 8.5)) - 8) * scale.astype(np.float16)

    def evenly(x, axis):
        least, step = x.min(axis, keepdims=True), np.ptp(x, axis=axis, keepdims=True) / 15
        return np.round((x - least) / step) * step.astype(np.float16) + least.astype(np.float16)

    def kivi(k, v):
        old = (TOKENS - 128) // 32 * 32
        keys = [evenly(k[i : i + 32], 0) for i in range(0, old, 32)]
        return np.concatenate([*keys, k[old:]]), np.concatenate([blocks(v[:old], lambda x: evenly(x, 1)), v[old:]])

    forms = dict(
        dense8=lambda k, v: (blocks(k, q8), blocks(v, q8)), dense4=lambda k, v: (blocks(k, q4), blocks(v, q4)), kivi=kivi
    )
    rows = {row["form"]: row for row in two_precisions.rows([layer], budgets=[], pages=[], codings=[])}
    assert [rows[name]["device_bytes"] for name in forms] == [2.125 * SIZE, 1.125 * SIZE, 1.25 * SIZE]
    for name, stored in forms.items():
        expected = mean_error(
            layer, lambda q, head, stored=stored: stored(np.asarray(layer.k[head]), np.asarray(layer.v[head]))
        )
        assert rows[name]["error"] == pytest.approx(expected, rel=0.01, abs=2e-5)


def test_pages_are_chosen_and_the_rest_weighed_as_the_walk_does(layer):
    index = index_of(form(layer, paged.FORMATION, 16, *residents(64)))
    q = layer.q.reshape(3, HEADS, GROUP, SIZE)
    chosen, rest = coded_attention.look(q, index, 12)
    for i in range(3):
        walk = select(q[i][None], None, index, fetched=12, method=RERANKED)
        assert (np.flatnonzero(chosen[i][0]) == np.sort(walk.page_ids[0, 0])).all()
        np.testing.assert_allclose(rest.out[i], walk.tail_out[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(rest.lse[i], walk.tail_lse[0], rtol=1e-5)


def test_a_tree_whose_nodes_are_all_opened_chooses_as_the_flat_scan():
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((HEADS, 40_000, SIZE)).astype(np.float32) for _ in range(2))
    q = 2 * rng.standard_normal((2, HEADS * GROUP, SIZE)).astype(np.float32)
    long = Captured(*map(jnp.asarray, (q, k, v)), layer=0, guess=None)
    index, q = index_of(form(long, "positional", 16, *residents(64))), long.q.reshape(2, HEADS, GROUP, SIZE)
    assert len(index.levels) == 2
    (chosen, rest), (nodes_of_all, tail) = (
        coded_attention.look(q, index, 12),
        coded_attention.walked(q, index, pages=12, opened=4096),
    )
    assert (chosen == nodes_of_all).all() and chosen.sum() == 2 * HEADS * 12
    np.testing.assert_allclose(rest.out, tail.out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rest.lse, tail.lse, rtol=1e-5)
    few = coded_attention.walked(q, index, pages=12, opened=1)[0]
    assert few.sum() == chosen.sum() and (few != chosen).any()


@pytest.mark.slow
def test_command_prints_rows_of_equal_bytes(capsys):
    options = ["--texts", "code", "--lengths", "700", "--budgets", "64", "--bits", "4,8/2,2/0", "--pages", "equal"]
    assert two_precisions.main([*options, "--scales", "int8", "--values", "channel"]) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["form"] for row in rows] == [
        "dense8",
        "dense4",
        "kivi",
        "today",
        *["look", "packed", "packed", "packed"] * 2,
        "look",
    ]
    today = rows[3]["bus_bytes"]
    assert all(row["bus_bytes"] <= 1.05 * today for row in rows if row["form"] == "look")
    assert two_precisions.main([*options, "--tile", "3000", "--layers", "2"]) == 0
    tiled = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(row["length"], row["tiled"], row["layers"]) for row in tiled} == {(3000, 700, 1)}
    assert all(row["layers"] == 4 and 0 < row["error"] < 0.5 for row in rows) and len(err.splitlines()) == len(rows) + 1


@pytest.mark.parametrize("size", [64, 40])
def test_values_by_token_share_a_line_in_groups_of_32(size):
    v, mask = test_key_codes.drawn(size)
    codes = coded_attention.encode_by_token(jnp.asarray(v), jnp.asarray(mask), 4, "float32")
    decoded = np.asarray(coded_attention.decode_by_token(codes, size, 4, "float32"))
    assert (
        codes.low.shape == (*test_key_codes.SHAPE[:2], test_key_codes.SHAPE[2] * 2, test_key_codes.SHAPE[3])
        and decoded.shape == v.shape
    )
    for page in np.ndindex(*test_key_codes.SHAPE[:3]):
        for first in range(0, size, 32):
            values = v[page][mask[page], first : first + 32]
            if len(values):
                test_key_codes.assert_nearest(decoded[page][mask[page], first : first + 32].T, values.T, 4)
    assert not decoded[~mask].any()


@pytest.mark.slow
def test_estimates_of_the_codes_error_are_near_it(capsys):
    """With all pages in codes; where digests stand beside them the estimate is `tolerant`'s, whose factor is 1.48."""
    line = ["--length", "4096", "--texts", "code", "--bits", "4", "--steps", "32", "--budgets", "64"]
    assert code_errors.main(line) == 0
    rows = [json.loads(x) for x in capsys.readouterr().out.splitlines()]
    assert [(row["form"], row["exact"], row.get("knows")) for row in rows] == [
        ("packed", 0, None),
        ("packed", 32, None),
        *((form, 32, knows) for form in ("coded", "look") for knows in ("both", "without_codes")),
    ]
    assert all(row["steps"] == 8 and 1 < row["ratio"] < 2 for row in rows)
    assert all(row["spearman"] > 0.7 and row["coverage"] == 1.0 for row in rows[:2])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_timed_forms_read_the_same_codes(bits):
    rng = np.random.default_rng(bits)
    k, v = (rng.standard_normal((2, 40, 16, 32)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((2, 3, 32)).astype(np.float32)
    ids = np.stack([rng.permutation(40)[:20] for _ in range(2)]).astype(np.int32)
    codes = [key_codes.encode_keys(jnp.asarray(x[None]), jnp.ones((1, 2, 40, 16), bool), bits, "bfloat16") for x in (k, v)]
    keys, values = (np.asarray(key_codes.decode_keys(x, 16, bits, "float32"))[0] for x in codes)
    keys, values = (np.stack([x[head, ids[head]].reshape(-1, 32) for head in range(2)]) for x in (keys, values))
    scores = np.einsum("kgh,ksh->kgs", q, keys)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    for form_name in code_reads.FORMS:
        laid = [code_reads.channel_after_channel(x, bits) for x in codes] if form_name == "channels" else codes
        actual = code_reads.coded(*map(jnp.asarray, (q, ids)), laid, *map(jnp.asarray, (k, v)), bits=bits, form=form_name)
        np.testing.assert_allclose(actual[0], weights, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(actual[1], np.einsum("kgs,ksh->kgh", weights, values), rtol=1e-3, atol=1e-5)
        best = np.argsort(-weights[0].sum(0))[0]
        np.testing.assert_array_equal(actual[2][0, 0], k[0, ids[0, best // 16], best % 16])
