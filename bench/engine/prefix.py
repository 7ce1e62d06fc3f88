"""A question about a document that the engine has stored, in memory or on the disk, against the same without a store."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import numpy as np

import icejax
from bench.engine.bars import judged
from bench.engine.subject import Asked, Sizes, Subject, timed


def measure(subject: Subject, sizes: Sizes) -> Iterator[dict]:
    """Yields a row for memory and one for the disk; engines run one after another, because two pools may not fit."""
    document = subject.prompt(sizes.document)
    options = dict(context=sizes.document + sizes.question + 2, answer=1, batch_size=1)

    def ask(engine: icejax.Engine, question: list[int] | None = None) -> Asked:
        return Asked(engine, document + (question or subject.prompt(sizes.question)), 1).wait(1)

    def row(measured: str, answers: list[Asked], compiled: dict[str, float]) -> dict:
        stored = [answer.ttft_s for answer in answers]
        ratios = [ours / theirs for ours, theirs in zip(stored, without, strict=True)]
        figures = dict(document=sizes.document, question=sizes.question)
        figures |= dict(cached_tokens=min(answer.newest.cached_tokens for answer in answers))
        seconds = dict(stored_ttft_s=float(np.median(stored)), without_ttft_s=float(np.median(without)))
        return judged("prefix", measured, ratios, **figures, **seconds, **compiled)

    with subject.engine(**options, prefix_memory=0) as engine:
        answers, _ = timed(lambda: ask(engine), sizes.repeats)
    without = [answer.ttft_s for answer in answers]
    with tempfile.TemporaryDirectory() as folder:
        options |= dict(prefix_memory=sizes.prefix_memory, prefix_dir=folder)
        with subject.engine(**options) as engine:
            first, second = subject.prompt(sizes.question), subject.prompt(sizes.question)
            for question in (first, second, second):  # the store keeps a common beginning that it has seen twice
                ask(engine, question)
            yield row("ttft", *timed(lambda: ask(engine), sizes.repeats))

        def ask_later_engine() -> Asked:
            with subject.engine(**options) as engine:
                return ask(engine)

        yield row("disk_ttft", *timed(ask_later_engine, sizes.repeats))
