"""Unlike requests in one stream, whose rows come and go, against batches of like length that run one after another."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

import icejax
from bench.engine.bars import judged
from bench.engine.subject import Sizes, Subject, timed
from icejax.engine.request import Request


def lognormal(rng: np.random.Generator, count: int, least: int, most: int) -> list[int]:
    """Returns lognormal numbers, whose limits are two standard deviations from the median and beyond which none is.

    Example: from 20 to 2,000 the median is 200, two thirds lie between 63 and 632, and 2% each are 20 and 2,000.
    """
    numbers = rng.lognormal(math.log(least * most) / 2, math.log(most / least) / 4, count)
    return np.clip(np.rint(numbers), least, most).astype(int).tolist()


def batches(requests: Sequence[Request], size: int) -> list[list[Request]]:
    """Returns requests of like prompt length together."""
    ordered = sorted(requests, key=lambda request: len(request.prompt))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def measure(subject: Subject, sizes: Sizes) -> Iterator[dict]:
    """Yields the row; both ways take turns."""
    rng = np.random.default_rng(1)
    prompts = lognormal(rng, sizes.lines, sizes.least_prompt, sizes.most_prompt)
    answers = lognormal(rng, sizes.lines, sizes.least_answer, sizes.most_answer)
    requests = [
        Request(prompt=subject.prompt(tokens), max_new_tokens=new) for tokens, new in zip(prompts, answers, strict=True)
    ]

    def stream() -> int:
        return _new_tokens(subject, requests, batch_size=sizes.batch)

    def by_batches() -> int:
        return sum(_new_tokens(subject, batch) for batch in batches(requests, sizes.batch))

    rates, compiled = timed(lambda: (_rate(stream, sum(answers)), _rate(by_batches, sum(answers))), sizes.repeats)
    stream_rate, batches_rate = (float(rate) for rate in np.median(rates, axis=0))
    figures = dict(lines=sizes.lines, batch=sizes.batch, prompt_tokens=sum(prompts), answer_tokens=sum(answers))
    figures |= dict(stream_tokens_per_s=stream_rate, batches_tokens_per_s=batches_rate) | compiled
    yield judged("lines", "throughput", [new / old for new, old in rates], **figures)


def _rate(run: Callable[[], int], expected: int) -> float:
    """Returns the answer tokens per second of a run."""
    started = time.perf_counter()
    tokens = run()
    if tokens != expected:
        raise RuntimeError(f"answers must have {expected} tokens in all, they have {tokens}")
    return tokens / (time.perf_counter() - started)


def _new_tokens(subject: Subject, requests: Sequence[Request], **options: int) -> int:
    return sum(answer.new_tokens for answer in icejax.generate(*subject.models, requests, cache=subject.policy, **options))
