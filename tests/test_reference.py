"""The clustered policy agrees step by step with the plain numpy one."""

import numpy as np
import pytest

from icejax.cache import Clustered
from icejax.ops import tree
from tests import layer as harness
from tests import tolerances
from tests.layer import Layer, draw
from tests.reference import Reference

STEPS = 200


@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no-tail"])
def test_200_steps_equal_the_reference(monkeypatch, tail):
    """Two blocks, pages put in order, two levels of nodes above the pages, twelve flushes, three compactions; prompts long and short."""
    monkeypatch.setattr(harness, "PROMPT", 4096)
    monkeypatch.setattr(tree, "TOP", 16)
    lengths = (4000, 150, 20)
    prompt, new = draw(lengths, STEPS, sharp=1.5)
    policy = Clustered(budget=128, candidates=4, opened=4, tail=tail, compact_every=64)
    ours = Layer(policy, lengths, *prompt)
    assert len(ours.state.index) == 3
    pairs = [(row, kv) for row in range(len(lengths)) for kv in range(harness.KV_HEADS)]
    theirs = {(r, kv): Reference(policy, prompt[1][r, :, kv], prompt[2][r, :, kv], lengths[r]) for r, kv in pairs}
    group = harness.HEADS // harness.KV_HEADS
    for step in range(STEPS):
        found = ours.step(*(x[step] for x in new))
        for row, kv in pairs:
            heads = slice(kv * group, kv * group + group)
            expected = theirs[row, kv].step(new[0][step, row, heads], new[1][step, row, kv], new[2][step, row, kv])
            np.testing.assert_allclose(
                found[row, heads], expected, rtol=0, atol=tolerances.EXACT, err_msg=f"step {step}, row {row}, KV head {kv}"
            )
