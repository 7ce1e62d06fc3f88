"""What an answer says of its pages: only pages that exist are fetched, needed and counted."""

import numpy as np
import pytest

import icejax
from icejax.cache.registry import Clustered


@pytest.mark.parametrize("resident", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_short_text_fetches_the_few_pages_it_has(bundled, resident):
    """Far fewer than the 56 a step may fetch; seven steps, before a window page becomes another."""
    states = []
    (found,) = icejax.generate(
        *bundled,
        "x = 1\n" * 25,
        cache=Clustered(budget=64, resident=resident, keys_first=False),
        max_new_tokens=8,
        watch=lambda state: states.append([np.asarray(layer.index.levels[0].count) for layer in state.cache.layers]),
    )
    assert found.new_tokens == 8 and found.prompt_tokens == 150
    exist = sum(int((count > 0).sum()) for count in states[0])
    assert exist == 4 * 2 * 9  # layers, heads, and pages of 134 tokens between sinks and window
    assert found.pages_fetched == (exist if resident else 7 * exist)
    assert found.hit_rate == pytest.approx(6 / 7 if resident else 0)
    assert 0 < found.pages_selected <= 7 * exist


def test_a_text_that_fits_the_device_fetches_nothing(bundled):
    (found,) = icejax.generate(*bundled, "x" * 38, cache=Clustered(), max_new_tokens=8)
    assert found.new_tokens == 8
    assert (found.pages_fetched, found.pages_selected, found.hit_rate) == (0, 0, None)
