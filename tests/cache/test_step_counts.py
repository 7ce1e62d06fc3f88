"""The page counts of an answer: only pages that exist are fetched, selected and counted."""

import numpy as np
import pytest

import icejax
from icejax.cache.registry import Clustered


@pytest.mark.slow
@pytest.mark.parametrize("resident", [False, True])
def test_a_short_text_fetches_the_few_pages_it_has(bundled, resident):
    """Seven steps, before the first flush; there are far fewer pages than the 56 that a step may fetch."""
    states = []
    (answer,) = icejax.generate(
        *bundled,
        "x = 1\n" * 25,
        cache=Clustered(budget=64, resident=resident, keys_first=False),
        max_new_tokens=8,
        watch=lambda state: states.append([np.asarray(layer.index.levels[0].count) for layer in state.cache.layers]),
    )
    assert answer.new_tokens == 8 and answer.prompt_tokens == 150
    num_pages = sum(int((count > 0).sum()) for count in states[0])
    assert num_pages == 4 * 2 * 9  # layers, KV heads, pages of the 134 tokens between sinks and window
    assert answer.pages_fetched == (num_pages if resident else 7 * num_pages)
    assert answer.hit_rate == pytest.approx(6 / 7 if resident else 0)
    assert 0 < answer.pages_selected <= 7 * num_pages


@pytest.mark.slow
def test_a_text_that_fits_the_device_fetches_nothing(bundled):
    (answer,) = icejax.generate(*bundled, "x" * 38, cache=Clustered(), max_new_tokens=8)
    assert answer.new_tokens == 8
    assert (answer.pages_fetched, answer.pages_selected, answer.hit_rate) == (0, 0, None)
