"""A policy that is `by_head` treats each KV head as it would alone, so that the devices of a mesh can share the heads.

Policies that `tests.helpers.on_devices` runs on several devices are left out.
"""

import numpy as np
import pytest

from icejax.cache.options import make_policy
from tests import tolerances
from tests.helpers.layer import HEADS, KV_HEADS, Layer, draw
from tests.helpers.on_devices import CASES
from tests.helpers.policies import KINDS

LENGTHS, STEPS, GROUP = (250, 40), 33, HEADS // KV_HEADS
ON_DEVICES = {type(make_policy(cache, {})) for _, cache, *_ in CASES.values()}
ROWS = [row for row in KINDS if row.small.by_head and type(row.small) not in ON_DEVICES]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_head_alone_attends_as_among_others(row):
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    text, _ = draw(LENGTHS, 0, seed=1)

    def outputs(heads: slice, queries: slice) -> list[np.ndarray]:
        of_heads = (queries, heads, heads)
        layer = Layer(row.small, LENGTHS, *(x[:, :, part] for x, part in zip(prompt, of_heads, strict=True)))
        steps = [layer.step(*(x[i][:, part] for x, part in zip(new, of_heads, strict=True))) for i in range(STEPS)]
        more = (x[:, :32, part] for x, part in zip(text, of_heads, strict=True))
        return [*steps, layer.extend(*more, new=(32, 20))[:, :20]]

    together = outputs(slice(None), slice(None))
    for head in range(KV_HEADS):
        queries = slice(head * GROUP, (head + 1) * GROUP)
        for whole, alone in zip(together, outputs(slice(head, head + 1), queries), strict=True):
            np.testing.assert_allclose(whole[..., queries, :], alone, rtol=0, atol=tolerances.EXACT)
