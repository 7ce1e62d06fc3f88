"""A document of the task that the bundled model was trained on."""

import numpy as np

from bench.needle import task


def document(seed: int = 3) -> tuple[str, tuple[task.Question, ...]]:
    context = task.context(np.random.default_rng(seed), length=1500, facts=task.Facts(keys=4), split="heldout")
    return context.text.decode(), context.questions
