"""A question about a document that the engine has stored, against the same without a store."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

import icejax
from bench.engine.bars import judged
from bench.engine.subject import Asked, Sizes, Subject, timed


def measure(subject: Subject, sizes: Sizes) -> Iterator[dict]:
    """Yields the row; the engine without a store runs first, because two pools may not fit beside each other."""
    document = subject.prompt(sizes.document)
    options = dict(context=sizes.document + sizes.question + 2, answer=1, batch_size=1)

    def ask(engine: icejax.Engine, question: list[int] | None = None) -> Asked:
        return Asked(engine, document + (question or subject.prompt(sizes.question)), 1).wait(1)

    with subject.engine(**options, prefix_memory=0) as engine:
        answers, _ = timed(lambda: ask(engine), sizes.repeats)
    without = [answer.ttft_s for answer in answers]
    with subject.engine(**options, prefix_memory=sizes.prefix_memory) as engine:
        first, second = subject.prompt(sizes.question), subject.prompt(sizes.question)
        for question in (first, second, second):  # the store keeps a common beginning that it has seen twice
            ask(engine, question)
        answers, compiled = timed(lambda: ask(engine), sizes.repeats)
    stored = [answer.ttft_s for answer in answers]
    seconds = dict(stored_ttft_s=float(np.median(stored)), without_ttft_s=float(np.median(without)))
    figures = dict(document=sizes.document, question=sizes.question)
    cached = min(answer.newest.cached_tokens for answer in answers)
    ratios = [ours / theirs for ours, theirs in zip(stored, without, strict=True)]
    yield judged("prefix", "ttft", ratios, **figures, cached_tokens=cached, **seconds, **compiled)
    print("prefix, from disk: left out: the engine stores no prefixes on disk", file=sys.stderr)
