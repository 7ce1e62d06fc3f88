"""Time of a prompt and of an answer on a model, alone and after a text: what `icejax bench` prints.

Tests and names follow llama.cpp's llama-bench: pp512 is a prompt of 512 tokens, tg128 an answer of 128, and
"@ d4096" puts them after 4,096 tokens that are not timed.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import numpy as np

from icejax.cache.pool.host_pool import Pool
from icejax.cache.pool.page_format import pool_bytes
from icejax.cache.protocol import CachePolicy
from icejax.checks.errors import InputError
from icejax.checks.numbers import POSITIONS
from icejax.engine.decode.counters import StepCounters
from icejax.engine.decode.state import DecodeState
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.extend import extend
from icejax.engine.plan import Plan, make_plan, reports
from icejax.engine.prefill import prefill
from icejax.models.decoder import CausalLM


@dataclass(frozen=True)
class SpeedTest:
    """A timed test: a prompt or an answer, after a text or nothing.

    Attributes:
        tokens: tokens that the time covers.
        answer: whether they are an answer, decoded one by one; False: a prompt, computed at once.
        depth: tokens in the cache before them.
    """

    tokens: int
    answer: bool
    depth: int = 0

    @property
    def name(self) -> str:
        """The name that llama-bench gives the test, such as "tg128 @ d4096"."""
        return f"{'tg' if self.answer else 'pp'}{self.tokens}{f' @ d{self.depth}' if self.depth else ''}"


@dataclass(frozen=True)
class Speed:
    """The times of a test, and the size of its cache.

    Attributes:
        seconds: of each repetition.
        device_kv_bytes, digest_bytes, host_kv_bytes: keys and values, and digests, on the device, and pages in host memory.
    """

    test: SpeedTest
    seconds: tuple[float, ...]
    device_kv_bytes: int
    digest_bytes: int
    host_kv_bytes: int

    @property
    def rates(self) -> tuple[float, float, float]:
        """Tokens per second: the median of the repetitions, the lowest and the highest."""
        rates = [self.test.tokens / seconds for seconds in self.seconds]
        return statistics.median(rates), min(rates), max(rates)


def measure(
    model: CausalLM,
    policy: CachePolicy,
    tests: list[SpeedTest],
    *,
    repetitions: int,
    host_memory_limit: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Speed]:
    """Yields the speed of each test, in order.

    Each repetition begins with an empty cache, and one more before the first compiles the programs and is not timed. The tokens
    are random; an answer is greedy and does not end at an eos.

    Args:
        host_memory_limit: bytes of host memory that a cache may take; None: all free memory.
        progress: called with the number of repetitions done, untimed ones included, and the number in all.

    Raises:
        InputError: a test has more tokens than RoPE computes, or the host has too little memory for a cache.
    """
    for test in tests:
        if test.depth + test.tokens >= POSITIONS:
            raise InputError(f"{test.name} needs a context of more than {POSITIONS} tokens: measure at a smaller depth")
    total = len(tests) * (1 + repetitions)
    progress(0, total)
    for number, test in enumerate(tests):
        runner, seconds = _Runner(model, policy, test, host_memory_limit), []
        for repetition in range(1 + repetitions):
            seconds.append(runner.run())
            progress(number * (1 + repetitions) + repetition + 1, total)
        yield Speed(test, tuple(seconds[1:]), *runner.bytes)


class _Runner:
    """Runs one test.

    Attributes:
        bytes: sizes of the newest run's cache, as in `Speed`.
    """

    def __init__(self, model: CausalLM, policy: CachePolicy, test: SpeedTest, limit: int | None) -> None:
        self._model, self._test, self._limit, self.bytes = model, test, limit, (0, 0, 0)
        # An answer needs a token to begin with: without a depth it is the whole prompt.
        self._first = test.depth or (1 if test.answer else test.tokens)
        extends = not test.answer and test.depth > 0
        new_tokens = 1 + (test.tokens if test.answer or extends else 0)
        sizes = dict(batch_size=1, prompt_tokens=self._first, new_tokens=new_tokens, extends=extends)
        self._plan = dataclasses.replace(make_plan(model, policy, **sizes), eos_token_ids=())

    def run(self) -> float:
        """Returns the seconds of the tokens that the test times."""
        test, vocabulary = self._test, self._model.config.vocab_size
        tokens = np.random.default_rng(0).integers(vocabulary, size=self._first + test.tokens).tolist()
        started = time.perf_counter()
        state, step, pool = prefill(self._model, [tokens[: self._first]], self._plan, host_memory_limit=self._limit)
        step.logits.block_until_ready()
        if test.answer:
            started, state, pool = self._decode(state, pool)
        elif test.depth:
            jax.block_until_ready((state, pool))
            started = time.perf_counter()
            state, step, pool = extend(self._model, tokens[self._first :], self._plan, state, pool)
            step.logits.block_until_ready()
        seconds = time.perf_counter() - started
        self.bytes = _cache_bytes(self._plan, state, pool)
        return seconds

    def _decode(self, state: DecodeState, pool: Pool | None) -> tuple[float, DecodeState, Pool | None]:
        """Decodes the answer; returns when the first step began, the state and the pool."""
        decoding, previous = DecodePrograms(self._model, self._plan), None
        jax.block_until_ready((state, pool))
        started = time.perf_counter()
        for _ in range(self._test.tokens):
            state, step, pool = decoding.step(state, pool)
            if previous is not None:  # as the decode loop does: the next step runs while the host reads this one's token
                StepCounters.read(previous.counters)
            previous = step
        StepCounters.read(previous.counters)
        return started, state, pool


def _cache_bytes(plan: Plan, state: DecodeState, pool: Pool | None) -> tuple[int, int, int]:
    digests = sum(report.digest_bytes for report in reports(plan, state.cache))
    return sum(x.nbytes for x in jax.tree.leaves(state.cache.layers)) - digests, digests, pool_bytes(pool)
