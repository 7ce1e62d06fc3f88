"""A text is written to the slots of each row in place: only its own tokens change the buffer."""

import jax.numpy as jnp
import numpy as np
import pytest

from icejax.ops.slots import append_text
from tests.helpers.run import jitted


@pytest.mark.parametrize("tokens", [3, 16, 40])
@pytest.mark.parametrize("slot", [(0, 5), (14, 15), (9, 0)])
def test_text_fills_the_slots_behind_a_row(tokens, slot):
    """At the end of a buffer, and for a padded text that is longer than the buffer, nothing moves."""
    rng, slots, heads, count = np.random.default_rng(0), 16, 2, (2, 1)
    buffer = rng.standard_normal((2 * heads, slots, 4)).astype(np.float32)
    new = rng.standard_normal((2, tokens, heads, 4)).astype(np.float32)
    expected = buffer.copy()
    for row in range(2):
        for i in range(count[row]):
            expected[row * heads : (row + 1) * heads, slot[row] + i] = new[row, i]
    actual = jitted(append_text, buffer, new, jnp.asarray(slot), jnp.asarray(count))
    np.testing.assert_array_equal(actual, expected)
