"""A long prompt is prefilled beside rows that decode: the time between their tokens, and the time to its own first token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import icejax
from bench.engine.bars import judged
from bench.engine.subject import Asked, Sizes, Subject, timed
from icejax.engine.serving.scheduler import Scheduler, Work

UNIT_S = 0.150  # seconds of a unit that the bar allows


@dataclass(frozen=True)
class Round:
    """Seconds of one round.

    Attributes:
        steps: between tokens of the rows, before the long prompt was submitted.
        gaps: between their tokens while it was prefilled.
        units: of every unit of prefill, as the engine counts it; none for an engine of another process.
        ttft_s, alone_s: to the long prompt's first token, beside the rows and in an idle engine.
    """

    steps: list[float]
    gaps: list[float]
    units: list[float]
    ttft_s: float
    alone_s: float


def gaps_between(times: Sequence[Sequence[float]], start: float, end: float) -> list[float]:
    """Returns the seconds between neighbouring tokens of each row that lie in a span of time, in part at least.

    Example: tokens at 0, 1, 4 and 5 s and a span from 2 to 3 s. The 3 s between the second and the third token are in it.
    """
    pairs = [pair for row in times for pair in zip(row, row[1:], strict=False)]
    return [later - earlier for earlier, later in pairs if later > start and earlier < end]


def judged_rounds(rounds: Sequence[Round], **sizes: float) -> Iterator[dict]:
    """Yields the rows of the time between tokens, over the gaps of all rounds, and of the time to the first token."""
    step_s = float(np.median([step for measured in rounds for step in measured.steps]))
    gaps = [gap for measured in rounds for gap in measured.gaps]
    p99_s = float(np.quantile(gaps, 0.99))
    units = [unit for measured in rounds for unit in measured.units]
    figures = dict(p99_s=p99_s, max_s=max(gaps), gaps=len(gaps), step_s=step_s)
    figures |= dict(longest_unit_s=max(units), units=len(units)) if units else {}
    yield judged("prefill", "itl", [p99_s / (UNIT_S + step_s)], **sizes, **figures)
    ratios = [measured.ttft_s / measured.alone_s for measured in rounds]
    seconds = {name: float(np.median([getattr(measured, name) for measured in rounds])) for name in ("ttft_s", "alone_s")}
    yield judged("prefill", "ttft", ratios, **sizes, **seconds)


def measure(subject: Subject, sizes: Sizes) -> Iterator[dict]:
    """Yields both rows."""
    context = max(sizes.long_prompt, sizes.prompt_tokens + sizes.row_tokens) + 2
    with subject.engine(context=context, answer=sizes.row_tokens, batch_size=sizes.rows + 1) as engine:
        rounds, compiled = timed(lambda: _round(subject, engine, sizes), sizes.repeats)
    labels = {name: getattr(sizes, name) for name in ("rows", "prompt_tokens", "long_prompt", "steps")}
    yield from judged_rounds(rounds, **labels, **compiled)


def _round(subject: Subject, engine: icejax.Engine, sizes: Sizes) -> Round:
    alone = Asked(engine, subject.prompt(sizes.long_prompt), 1).wait(1)
    others = [Asked(engine, subject.prompt(sizes.prompt_tokens), sizes.row_tokens) for _ in range(sizes.rows)]
    started = max(row.wait(1).times[0] for row in others)
    for row in others:
        row.wait(len(row.times) + sizes.steps)
    with prefill_units() as units:
        late = Asked(engine, subject.prompt(sizes.long_prompt), 1).wait(1)
    for row in others:
        row.wait(len(row.times) + 1)  # the step in which the first token came is over
    times = [list(row.times) for row in others]
    for row in others:
        row.cancel()
    before = [[time for time in row if started <= time <= late.asked] for row in times]
    gaps = gaps_between(times, late.asked, late.times[0])
    return Round(gaps_between(before, started, late.asked), gaps, units, late.ttft_s, alone.ttft_s)


@contextlib.contextmanager
def prefill_units() -> Iterator[list[float]]:
    """Yields a list that gets the seconds of each unit of prefill, as engines report them to their schedulers."""
    seconds, ran = list[float](), Scheduler.ran

    def record(scheduler: Scheduler, work: Work, spent: float) -> None:
        if work is Work.PREFILL:
            seconds.append(spent)
        ran(scheduler, work, spent)

    Scheduler.ran = record
    try:
        yield seconds
    finally:
        Scheduler.ran = ran
