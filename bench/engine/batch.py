"""Tokens per second of a batch and of one row, in decode steps alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

import icejax
from bench.engine.bars import judged
from bench.engine.subject import Asked, Sizes, Subject, timed


def decode_rate(times: Sequence[Sequence[float]]) -> float:
    """Returns the tokens per second of rows while all of them decode: the sum of the rows' rates.

    Rows that do not take a step together are answered one after another: their rate is that of all steps over the whole time.

    Example: tokens at 0, 1, 2, 3 and 4 s in one row, and at 2, 3, 4 and 5 s in another. From 2 to 4 s both decode, each with a
    token per second: the rate is 2. With tokens at 0, 1 and 2 s, and at 3, 4 and 5 s, it is 4 steps in 5 s.

    Args:
        times: the times of each row's tokens, two or more.
    """
    start, end = max(row[0] for row in times), min(row[-1] for row in times)
    windows = [[time for time in row if start <= time <= end] for row in times]
    if any(len(row) < 2 for row in windows):
        return sum(len(row) - 1 for row in times) / (max(row[-1] for row in times) - min(row[0] for row in times))
    return sum((len(row) - 1) / (row[-1] - row[0]) for row in windows)


def measure(subject: Subject, sizes: Sizes) -> Iterator[dict]:
    """Yields the row; an engine of `batch` rows and one of a single row take turns."""
    options = dict(context=sizes.prompt_tokens + sizes.steps + 2, answer=sizes.steps + 1)
    # With this share all prompts are prefilled before the first step, so the rows decode together from their first token on.
    options |= dict(prefill_share=1.0)
    with (
        subject.engine(batch_size=1, **options) as single,
        subject.engine(batch_size=sizes.batch, **options) as several,
    ):

        def run() -> tuple[float, float]:
            return _rate(subject, several, sizes.batch, sizes), _rate(subject, single, 1, sizes)

        rates, compiled = timed(run, sizes.repeats)
    figures = dict(batch=sizes.batch, prompt_tokens=sizes.prompt_tokens, steps=sizes.steps)
    batch_rate, one_rate = (float(rate) for rate in np.median(rates, axis=0))
    figures |= dict(batch_tokens_per_s=batch_rate, one_tokens_per_s=one_rate) | compiled
    yield judged("batch", "throughput", [several / one for several, one in rates], **figures)


def _rate(subject: Subject, engine: icejax.Engine, rows: int, sizes: Sizes) -> float:
    answers = [Asked(engine, subject.prompt(sizes.prompt_tokens), sizes.steps + 1) for _ in range(rows)]
    return decode_rate([answer.wait(sizes.steps + 1).times for answer in answers])
