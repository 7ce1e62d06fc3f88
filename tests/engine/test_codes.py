"""Codes in the pool are those of the pages beside them, wherever pages are written, moved, copied or saved."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import icejax
from icejax.api.generate import ASSETS
from icejax.cache.registry import Clustered
from icejax.engine.batch import extract, fold_into_prompt, fork, insert
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.extend import extend
from icejax.ops.pages.key_codes import decode_keys
from tests.engine.test_batch import Batch, model  # noqa: F401  a fixture
from tests.helpers import families
from tests.helpers.documents import document
from tests.helpers.layer import stored

LOOK = Clustered(budget=48, page_size=8, compact_every=32, look=4)
APART = 0.3  # relative error of a page in 4 bits; measured at most 0.062, and another page's codes are about 1.4 apart


def assert_codes(plan, state, pool, *, fewest: int) -> None:
    """Asserts that the codes of at least `fewest` pages of each layer, row and KV head stand for these pages."""
    table = np.asarray(state.cache.table)
    pages = stored(pool, table)  # B P L K planes p W
    codes = np.asarray(pool.codes)[table].swapaxes(2, 3)
    codes = codes.reshape(len(table), -1, *codes.shape[3:])
    for nth, layer in enumerate(plan.pooled):
        policy, counts = plan.policies[layer], np.asarray(plan.policies[layer].counts(state.cache.layers[layer]))
        counts = counts[:, :, : pages.shape[1]]
        data = codes[:, : counts.shape[2], nth, :, 0, 0].swapaxes(1, 2)  # B K P n
        coded = policy.reads._codes(plan.spec.planes).read(jnp.asarray(data), jnp.asarray(counts))
        assert (counts > 0).sum(-1).min() >= fewest
        slots = np.arange(policy.page_size) < counts[..., None]
        for plane, vectors in enumerate((coded.keys, coded.values)):
            exact = pages[:, : counts.shape[2], nth, :, plane].swapaxes(1, 2)
            difference = np.asarray(decode_keys(vectors, policy.page_size, policy.look, "float32")) - exact
            apart, size = (np.linalg.norm(np.where(slots[..., None], x, 0), axis=(3, 4)) for x in (difference, exact))
            assert (apart <= APART * size).all(), (layer, plane, (apart / np.maximum(size, 1e-9)).max())


@pytest.mark.slow
def test_codes_follow_their_pages_through_a_batch(model):  # noqa: F811
    """Rows join late, are compacted, wrap around the pages of new tokens, are taken out, grow by a text and are forked."""
    batch = Batch(model, LOOK, rows=2, longest=500)
    batch.step(230)
    batch.join(families.tokens(120, seed=1), 0)
    batch.step(6)
    batch.join(families.tokens(90), 1)
    batch.step(45)
    assert_codes(batch.plan, batch.state, batch.pool, fewest=12)
    batch.state, row = extract(batch.state, 1)
    more = families.tokens(40, seed=2)
    row, batch.pool = fold_into_prompt(row, batch.pool, batch.extents, plan=batch.row_plan, tokens=len(more))
    assert_codes(batch.row_plan, row, batch.pool, fewest=12)
    row, _, batch.pool = extend(model, more, batch.row_plan, row, batch.pool)
    batch.state = insert(batch.state, row, 1, plan=batch.plan)
    batch.logits.clear()
    batch.step(40)
    assert_codes(batch.plan, batch.state, batch.pool, fewest=16)
    twin, batch.pool = fork(batch.state, batch.pool, batch.extents, plan=batch.plan)
    programs = DecodePrograms(model, batch.plan)
    programs.clock = batch.programs.clock
    twin = dataclasses.replace(twin, last_tokens=jnp.asarray([7, 7], jnp.int32))
    for _ in range(40):
        twin, _, batch.pool = programs.step(twin, batch.pool)
        batch.step()
    for state in (batch.state, twin):
        assert_codes(batch.plan, state, batch.pool, fewest=20)


@pytest.mark.slow
def test_sessions_keep_codes_bit_for_bit(bundled, tmp_path):
    text, questions = document()
    policy = Clustered(budget=64, compact_every=32, look=4)
    session = icejax.Session(*bundled, cache=policy, context_length=3000)
    answer = session.ask(text, max_new_tokens=70)
    assert answer.run.host_kv_bytes == sum(x.nbytes for x in session._cache.run.pool)
    session.save(tmp_path / "kept")
    loaded = icejax.Session.load(tmp_path / "kept", *bundled)
    runs = [x._cache.run for x in (session, loaded)]
    pages = int(runs[0].state.cache.lengths.next_page)
    codes = [stored_codes(run)[:pages] for run in runs]
    np.testing.assert_array_equal(codes[1], codes[0])
    assert codes[0].any((1, 2, 3, 4, 5)).all()
    assert_codes(session._cache.plan, runs[1].state, runs[1].pool, fewest=pages - 8)
    for question in questions[:2]:
        assert session.ask(question.text).token_ids == loaded.ask(question.text).token_ids


def stored_codes(run) -> np.ndarray:
    """Returns the codes of a row's pages, page after page."""
    codes = np.asarray(run.pool.codes)[np.asarray(run.state.cache.table)[0]].swapaxes(1, 2)
    return codes.reshape(-1, *codes.shape[2:])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_of_16_bits_answers_from_codes(dtype):
    model, tokenizer = icejax.load(ASSETS, dtype=dtype)  # noqa: F811
    text, questions = document()
    cache = Clustered(budget=64, look=4, looked=40)
    for question in questions[:2]:
        answer = icejax.generate(model, tokenizer, text + question.text, cache=cache, max_new_tokens=8)[0]
        assert answer.text == question.answer
