"""A held-out document of the needle task on which the bundled model was trained."""

import numpy as np

from bench.needle import task


def document(seed: int = 3) -> tuple[str, tuple[task.Question, ...]]:
    """Returns a text of 1,500 bytes and its questions."""
    context = task.context(np.random.default_rng(seed), length=1500, facts=task.Facts(keys=4), split="heldout")
    return context.text.decode(), context.questions
