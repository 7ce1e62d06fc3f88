"""Steps of a policy beside steps of its reference."""

import numpy as np

from tests import tolerances
from tests.helpers.layer import PROMPT, Layer
from tests.reference.retrieval import Paged

LENGTHS, STEPS = (250, 9, 100), 64


def row_of(arrays, row: int, length: int) -> dict[str, np.ndarray]:
    """Returns a row's prompt as a reference takes it."""
    return {name: x[row, :length] for name, x in zip("qkv", arrays, strict=True)}


def compare(policy, theirs: list, prompt, new, check) -> Layer:
    """Steps both through the new tokens; `check` is given the layer, a row and its reference after every step."""
    layer = Layer(policy, LENGTHS, *prompt)
    for step in range(STEPS):
        found = layer.step(*(x[step] for x in new))
        for row, one in enumerate(theirs):
            one.append(new[1][step, row], new[2][step, row])
            expected = one.attend(new[0][step, row])
            np.testing.assert_allclose(found[row], expected, rtol=0, atol=tolerances.EXACT, err_msg=f"step {step}, row {row}")
            taken = np.mean([len(positions) for positions in one.selected(new[0][step, row])])
            np.testing.assert_allclose(layer.tokens[0, row], taken, rtol=1e-6, err_msg=f"step {step}, row {row}")
            check(layer, row, one, new[0][step, row])
    return layer


def kept(layer: Layer, row: int, head: int) -> list[int]:
    positions = np.asarray(layer.state.positions)[row, head]
    return sorted(positions[positions >= 0].tolist())


def at_positions(layer: Layer, row: int, one: Paged, positions: list[int]) -> list[int]:
    """Returns where in the pool the tokens at `positions` are, sorted."""
    places = zip(numbers(layer, row, one), one.pages, strict=True)
    slots = {p: number * one.page_size + i for number, page in places for i, p in enumerate(page)}
    return sorted(slots[p] for p in positions)


def numbers(layer: Layer, row: int, one: Paged) -> list[int]:
    """Returns where in the pool the pages of `one` are: those of decoded tokens behind all that a prompt may have."""
    several = PROMPT // one.page_size
    first = -(-max(LENGTHS[row] - one.fill - one.sinks, 0) // one.page_size)
    return [i if i < first else i - first + several for i in range(len(one.pages))]
