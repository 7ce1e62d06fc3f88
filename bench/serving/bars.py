"""The bars of `bench.engine` as clients see them: streams that decode together, and a long prompt that comes beside streams."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

import numpy as np

from bench.engine.bars import judged
from bench.engine.batch import decode_rate
from bench.engine.prefill import Round, gaps_between, judged_rounds
from bench.serving.client import Timed
from bench.serving.parts import idle
from bench.serving.subject import OverHttp, Question, Questions, Subject
from icejax.checks.errors import InputError

ROWS = 4  # streams beside a long prompt, as in bench.engine
POLL_S = 0.005


async def batch(one: Subject, several: Subject, questions: Questions, *, rows: int, repeats: int, **sizes: int) -> dict:
    """Returns the row of the tokens per second of so many streams and of one; the two servers take turns.

    Args:
        sizes: `prompt_tokens` and `answer_tokens` of each stream.
    """
    rates = list[tuple[float, float]]()
    for _ in range(1 + repeats):  # the first round is not timed
        rates.append((await _rate(several, questions.many(rows, **sizes)), await _rate(one, questions.many(1, **sizes))))
    batch_rate, one_rate = (float(rate) for rate in np.median(rates[1:], axis=0))
    figures = dict(batch=rows, batch_tokens_per_s=batch_rate, one_tokens_per_s=one_rate)
    return judged("batch", "throughput", [many / single for many, single in rates[1:]], **sizes, **figures)


async def prefill(
    subject: OverHttp, questions: Questions, *, prompt_tokens: int, answer_tokens: int, long_prompt: int, repeats: int
) -> AsyncIterator[dict]:
    """Yields the rows of the time between the tokens of streams while a long prompt is prefilled, and to its first token.

    Args:
        answer_tokens: that each stream has before the long prompt comes.
        long_prompt: more than `prompt_tokens`; a stream ends after as many tokens in all.
    """
    sizes = dict(prompt_tokens=prompt_tokens, long_prompt=long_prompt)
    with contextlib.suppress(InputError):  # this round may compile for longer than its streams last
        await _round(subject, questions, answer_tokens, **sizes)
    rounds = [await _round(subject, questions, answer_tokens, **sizes) for _ in range(repeats)]
    for row in judged_rounds(rounds, rows=ROWS, **sizes):
        yield row


async def _round(subject: OverHttp, questions: Questions, answer_tokens: int, *, prompt_tokens: int, long_prompt: int) -> Round:
    alone = await _answered(subject, Question(questions.text(long_prompt), 1))
    async with _streams(subject, questions.many(ROWS, prompt_tokens, long_prompt - prompt_tokens)) as streams:
        await _until(streams, answer_tokens)
        started = max(stream.times[0] for stream in streams)
        late = await _answered(subject, Question(questions.text(long_prompt), 1))
        await _until(streams, 1 + max(len(stream.times) for stream in streams))
        times = [list(stream.times) for stream in streams]
    before = [[moment for moment in row if started <= moment <= late.asked] for row in times]
    steps, gaps = gaps_between(before, started, late.asked), gaps_between(times, late.asked, late.times[0])
    first, first_alone = late.times[0] - late.asked, alone.times[0] - alone.asked
    return Round(steps, gaps, [], first, first_alone)


async def _rate(subject: Subject, asked: Sequence[Question]) -> float:
    answers = await asyncio.gather(*(_answered(subject, question) for question in asked))
    return decode_rate([answer.times for answer in answers])


async def _answered(subject: Subject, question: Question) -> Timed:
    timed = await subject.answer(question)
    if timed.error is not None or not timed.times:
        raise InputError(f"a request was not answered: {timed.error or 'its answer is empty'}")
    return timed


@contextlib.asynccontextmanager
async def _streams(subject: OverHttp, asked: Sequence[Question]) -> AsyncIterator[list[Timed]]:
    """Yields answers that grow; their clients leave when the block ends, and the server is idle again after it."""
    streams = [Timed(time.perf_counter()) for _ in asked]
    tasks = [asyncio.create_task(subject.answer(*pair)) for pair in zip(asked, streams, strict=True)]
    try:
        yield streams
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await idle(subject)


async def _until(streams: Sequence[Timed], pieces: int) -> None:
    """Waits until each stream has so many pieces.

    Raises:
        InputError: one ends before.
    """
    while any(len(stream.times) < pieces for stream in streams):
        if ended := [stream for stream in streams if stream.error is not None or stream.over]:
            raise InputError(f"a stream ended after {len(ended[0].times)} pieces: {ended[0].error or 'it has no more'}")
        await asyncio.sleep(POLL_S)
