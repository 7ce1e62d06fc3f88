"""The measurements: loads, questions about one document, clients that leave, and memory over a long time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence

import numpy as np

from bench.serving.client import Timed, metric
from bench.serving.rows import failures, load_row, rounded, slope
from bench.serving.subject import OverHttp, Question, Questions, Subject, closed_loop, open_loop
from icejax.checks.errors import InputError

PROGRAMS, EXTENTS, BYTES = "icejax_compiled_programs", "icejax_free_extents", "process_resident_memory_bytes"
WARM_TOKENS = 8
LOOKS = 4  # of so many requests of `soak` one is the page's
SAMPLE_S = 5.0  # seconds between two looks at a server's memory


async def loads(
    subject: Subject,
    questions: Questions,
    *,
    count: int,
    prompt_tokens: int,
    answer_tokens: int,
    concurrency: Sequence[int],
    rates: Sequence[float],
) -> AsyncIterator[dict]:
    """Yields a row for each number of open requests, and for each rate of requests that come at random times.

    Before each row as many requests as are open, with answers of a few tokens, run and are not timed.
    """
    for most, rate in [*((n, None) for n in concurrency), *((None, rate) for rate in rates)]:
        warm = most or max(concurrency, default=1)
        await closed_loop(subject, questions.many(warm, prompt_tokens, min(answer_tokens, WARM_TOKENS)), warm)
        asked = questions.many(count, prompt_tokens, answer_tokens)
        run = closed_loop(subject, asked, most) if rate is None else open_loop(subject, asked, rate)
        answers, duration = await run
        fail_if_none(answers)
        sizes = dict(num_prompts=count, max_concurrency=most, request_rate=rate)
        yield dict(part="load") | sizes | load_row(answers, duration)


async def document(
    subject: Subject, questions: Questions, *, tokens: int, answer_tokens: int, asked: int
) -> AsyncIterator[dict]:
    """Yields a row for each question about one document, one after another."""
    text = questions.text(tokens)
    for number in range(1, asked + 1):
        timed = await subject.answer(Question(f"{text}\n# question {number}: ", answer_tokens))
        fail_if_none([timed])
        row = load_row([timed], timed.over - timed.asked)
        known = dict(prompt_tokens=timed.prompt_tokens, cached_tokens=timed.cached_tokens)
        yield dict(part="document", question=number) | known | {name: row[name] for name in ("mean_ttft_ms", "mean_e2el_ms")}


async def cancels(subject: OverHttp, questions: Questions, *, count: int, most_prompt: int, most_answer: int) -> dict:
    """Returns the row of clients that leave at random times, eight at once: in the queue, in prefill, or between two tokens.

    The server must store no prefixes, so that all extents are free when no request runs.
    """
    rng, server = np.random.default_rng(1), subject.server
    timed = await subject.answer(questions.random(most_prompt, most_answer))  # the longest wait
    fail_if_none([timed])
    await idle(subject)
    longest, before = max(timed.over - timed.asked, 0.2), await metric(server, EXTENTS)
    leaving = over = 0

    async def client() -> None:
        nonlocal longest, leaving, over
        while leaving < count:
            leaving += 1
            task = asyncio.create_task(subject.answer(questions.random(most_prompt, most_answer)))
            done, _ = await asyncio.wait([task], timeout=rng.uniform(0, longest))
            if done:  # the next ones leave sooner
                leaving, over, longest = leaving - 1, over + 1, 0.95 * longest
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(client() for _ in range(8)))
    await idle(subject)
    leaked = before - await metric(server, EXTENTS)
    fail_if_none([await subject.answer(questions.random(most_prompt, most_answer))])
    return dict(part="cancel", cancels=count, over_before=over, free_extents=int(before), extents_leaked=int(leaked))


async def soak(
    subject: OverHttp, questions: Questions, *, minutes: float, most_prompt: int, most_answer: int, concurrency: int
) -> dict:
    """Returns the row of random requests over some minutes: the server's memory at the start, at the end and per hour.

    One of four is the page's, with the other requests that the page sends. The slope is that of the later half of the time,
    when caches and queues have been filled once.

    Raises:
        InputError: no request was answered, or the server did not answer one for its memory.
    """
    server, answers, end = subject.server, list[Timed](), time.monotonic() + 60 * minutes
    times, sizes, asked, looks = list[float](), list[float](), 0, 0

    async def client() -> None:
        nonlocal asked, looks
        while time.monotonic() < end:
            question, is_look = questions.random(most_prompt, most_answer), asked % LOOKS == 0
            asked, looks = asked + 1, looks + is_look
            answers.append(await (subject.look if is_look else subject.answer)(question))

    async def watch() -> None:
        while True:
            times.append(time.monotonic() / 60)
            sizes.append(await metric(server, BYTES) / 2**20)
            await asyncio.sleep(SAMPLE_S)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(client() for _ in range(concurrency)))
    if watcher.done():  # only an error ends it
        await watcher
    watcher.cancel()
    fail_if_none(answers)
    memory = dict(rss_start_mib=sizes[0], rss_end_mib=sizes[-1], rss_most_mib=max(sizes), rss_mib_per_hour=slope(times, sizes))
    return rounded(dict(part="soak", minutes=minutes, requests=len(answers), looks=looks) | failures(answers) | memory)


async def idle(subject: OverHttp, *, seconds: float = 60.0) -> None:
    """Waits until a server runs no request; InputError if it continues for longer."""
    end = time.monotonic() + seconds
    while True:
        health = json.loads(await subject.server.get("/health"))
        if not health["running"] and not health["waiting"]:
            return
        if time.monotonic() > end:
            raise InputError(f"{subject.server.url} still runs {health['running']} requests that no client waits for")
        await asyncio.sleep(0.1)


def fail_if_none(answers: Sequence[Timed]) -> None:
    """Raises InputError if no request was answered, with the first error."""
    if answers and all(answer.error is not None or not answer.tokens for answer in answers):
        raise InputError(f"no request was answered: {answers[0].error or 'answers are empty'}")
