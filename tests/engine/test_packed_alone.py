"""The packed cache without exact tokens: no host memory in any part of the engine, and rows that move as with it."""

import numpy as np
import pytest

import icejax
from icejax.cache.registry import Packed
from icejax.engine.batch import extract, fold_into_prompt, insert
from icejax.engine.extend import extend
from icejax.engine.plan import make_plan
from icejax.evaluation.attention_map import Explanation
from icejax.session.usage import session_usage
from tests import tolerances
from tests.engine.test_batch import PAGE, Batch, model  # noqa: F401  a fixture
from tests.helpers import families
from tests.helpers.documents import document

POLICY = Packed(budget=64, page_size=PAGE, exact=0)


@pytest.mark.slow
def test_a_session_has_nothing_in_host_memory(bundled, tmp_path):
    """It is saved and continues with the same answers; its codes are all on the device."""
    text, questions = document()
    session = icejax.Session(*bundled, cache=Packed(budget=128, exact=0), context_length=3000)
    answer = session.ask(text + questions[0].text)
    assert answer.text == questions[0].answer
    assert (answer.run.host_kv_bytes, answer.run.fetch_backend) == (0, None)
    packed = icejax.generate(*bundled, text, cache=Packed(budget=128), max_new_tokens=2)[0].run
    assert packed.host_kv_bytes > 0 and packed.fetch_backend
    session.save(tmp_path / "kept")
    loaded = icejax.Session.load(tmp_path / "kept", *bundled)
    for question in questions[1:3]:
        assert session.ask(question.text).token_ids == loaded.ask(question.text).token_ids
    usage = session_usage(session)
    assert (usage.host, usage.host_used) == (0, 0)


def test_a_plan_needs_no_way_to_read_host_memory(bundled):
    sizes = dict(batch_size=1, prompt_tokens=300, new_tokens=20)
    for platform in ("cpu", "gpu", "tpu"):
        plan = make_plan(bundled[0], Packed(exact=0), platform=platform, **sizes)
        assert (plan.fetch_backend, plan.pool.planes, plan.compact_every) == ("", 0, 0)
    with pytest.raises(icejax.InputError, match="packed fetches single tokens, which TPU cannot"):
        make_plan(bundled[0], Packed(), platform="tpu", **sizes)
    with pytest.raises(icejax.InputError, match="^explain shows what is fetched from the host: it needs pages there"):
        Explanation(bundled[0], [1, 2, 3], Packed(exact=0), new_tokens=4)


@pytest.mark.slow
def test_a_row_that_leaves_grows_and_joins_again_is_as_alone(model):  # noqa: F811
    """Its pages leave the window at the same steps as alone; another row decodes beside it."""
    logits = []
    for begun in (0, 232):
        batch = Batch(model, POLICY, rows=2, longest=500)
        assert batch.pool == ()
        batch.join(families.tokens(120, seed=1), 0)
        batch.step(begun)
        batch.join(families.tokens(90), 1)
        batch.step(40)
        before, more = batch.logits.pop(1), families.tokens(40, seed=2)
        batch.state, row = extract(batch.state, 1)
        row, batch.pool = fold_into_prompt(row, batch.pool, batch.extents, plan=batch.row_plan, tokens=len(more))
        row, step, batch.pool = extend(model, more, batch.row_plan, row, batch.pool)
        batch.step(8)
        batch.state, batch.logits[1] = insert(batch.state, row, 1, plan=batch.plan), [np.asarray(step.logits)[0]]
        batch.step(20)
        logits.append([*before, *batch.logits[1]])
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=tolerances.LOGITS)
