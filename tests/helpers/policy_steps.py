"""Compares decode steps of a policy with those of its numpy reference in `tests.reference`, row by row."""

import numpy as np

from tests import tolerances
from tests.helpers.layer import PROMPT, Layer
from tests.reference.retrieval import Paged

LENGTHS, STEPS = (250, 9, 100), 64


def row_of(arrays, row: int, length: int) -> dict[str, np.ndarray]:
    """Returns the prompt of one row, without padding, as a reference's keyword arguments q, k and v."""
    return {name: x[row, :length] for name, x in zip("qkv", arrays, strict=True)}


def compare(policy, references: list, prompt, new, check) -> Layer:
    """Decodes `new` with the policy and with `references`, one per row; asserts equal outputs and token counts.

    After each step, calls `check(layer, row, reference, q)` for every row; returns the layer.
    """
    layer = Layer(policy, LENGTHS, *prompt)
    for step in range(STEPS):
        outputs = layer.step(*(x[step] for x in new))
        for row, reference in enumerate(references):
            reference.append(new[1][step, row], new[2][step, row])
            expected = reference.attend(new[0][step, row])
            np.testing.assert_allclose(outputs[row], expected, rtol=0, atol=tolerances.EXACT, err_msg=f"step {step}, row {row}")
            num_tokens = np.mean([len(positions) for positions in reference.selected(new[0][step, row])])
            np.testing.assert_allclose(layer.tokens[0, row], num_tokens, rtol=1e-6, err_msg=f"step {step}, row {row}")
            check(layer, row, reference, new[0][step, row])
    return layer


def kept(layer: Layer, row: int, head: int) -> list[int]:
    """Returns the sorted positions of the tokens that an eviction policy holds."""
    positions = np.asarray(layer.state.positions)[row, head]
    return sorted(positions[positions >= 0].tolist())


def at_positions(layer: Layer, row: int, reference: Paged, positions: list[int]) -> list[int]:
    """Returns the sorted pool slots of the tokens at `positions`."""
    numbered_pages = zip(numbers(layer, row, reference), reference.pages, strict=True)
    slots = {position: number * reference.page_size + i for number, page in numbered_pages for i, position in enumerate(page)}
    return sorted(slots[position] for position in positions)


def numbers(layer: Layer, row: int, reference: Paged) -> list[int]:
    """Returns the pool page of each page of `reference`; decoded tokens' pages start behind room for PROMPT tokens."""
    prompt_pages = PROMPT // reference.page_size
    pages_of_prompt = -(-max(LENGTHS[row] - reference.fill - reference.sinks, 0) // reference.page_size)
    return [i if i < pages_of_prompt else i - pages_of_prompt + prompt_pages for i in range(len(reference.pages))]
