"""The clustered policy's output equals the plain numpy reference's at every decode step, or where that is slow at each fifth."""

import numpy as np
import pytest

from icejax.cache.registry import Clustered
from icejax.ops.pages import tree
from tests import tolerances
from tests.helpers import layer as harness
from tests.helpers.layer import Layer, draw, uneven
from tests.reference.clustered import Reference

STEPS = 200
SLOW = dict(marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "options, every",
    [
        pytest.param(dict(candidates=2), 5, id="keys-first"),  # five steps have no phase in common with pages of 16 tokens
        pytest.param(dict(candidates=2), 1, id="keys-first-each-step", **SLOW),
        pytest.param(dict(keys_first=False), 1, id="whole-pages", **SLOW),
        pytest.param(dict(tail=False), 1, id="no-tail", **SLOW),
    ],
)
def test_200_steps_equal_the_reference(monkeypatch, options, every):
    """Two packing blocks, two levels of nodes above the pages, twelve flushes and three compactions; long and short prompts."""
    monkeypatch.setattr(harness, "PROMPT", 4096)
    policy = Clustered(**dict(budget=128, candidates=4, opened=4, compact_every=64) | options)
    assert_reference(monkeypatch, policy, (4000, 150, 20), STEPS, levels=3, every=every)


@pytest.mark.slow
@pytest.mark.parametrize("clock", [1, 7, 24, 63])
def test_rows_that_join_late_equal_the_reference(monkeypatch, clock):
    """Rows join inside a page and inside a round of compaction, and decode over the next two rounds."""
    policy = Clustered(budget=48, page_size=8, candidates=1, opened=4, compact_every=32)
    assert_reference(monkeypatch, policy, (250, 21, 7), 70, levels=2, clock=clock)


def assert_reference(
    monkeypatch, policy, lengths, steps, *, levels, clock=0, every=1, reference=Reference, atol=tolerances.EXACT
):
    """`every`: of how many steps one is compared."""
    monkeypatch.setattr(tree, "TOP", 16)
    # Values depend on keys in part, so that the value fit has something to fit.
    mix = np.random.default_rng(1).standard_normal((harness.SIZE, harness.SIZE)).astype(np.float32) / harness.SIZE**0.5
    prompt, new = ((*uneven(q, k), v + k @ mix) for q, k, v in draw(lengths, steps, sharp=1.5))
    layer = Layer(policy, lengths, *prompt)
    layer.join(clock)
    assert levels is None or len(layer.state.index.levels) == levels
    pairs = [(row, kv) for row in range(len(lengths)) for kv in range(harness.KV_HEADS)]
    group = harness.HEADS // harness.KV_HEADS
    of_head = lambda r, kv: (prompt[0][r, :, kv * group : kv * group + group], *(x[r, :, kv] for x in prompt[1:]))  # noqa: E731
    references = {(r, kv): reference(policy, *of_head(r, kv), lengths[r], clock=clock) for r, kv in pairs}
    for step in range(steps):
        out = layer.step(*(x[step] for x in new))
        for row, kv in pairs:
            heads = slice(kv * group, kv * group + group)
            tokens = new[0][step, row, heads], new[1][step, row, kv], new[2][step, row, kv]
            if step % every:
                references[row, kv].append(*tokens[1:])
                continue
            expected = references[row, kv].step(*tokens)
            np.testing.assert_allclose(
                out[row, heads], expected, rtol=0, atol=atol, err_msg=f"step {step}, row {row}, KV head {kv}"
            )
