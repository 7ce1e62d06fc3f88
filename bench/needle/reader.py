"""Keeps a text in a cache and asks several questions about it: for `bench.needle.evaluate` and `bench.compare`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import icejax
from icejax.cache.pool import allocation
from icejax.cache.pool.extents import Extents, extents_for
from icejax.engine.batch import fork
from icejax.engine.decode.counters import StepCounters
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.plan import make_plan
from icejax.engine.prefill import first_state, keep_layers, prefill
from icejax.runtime import devices


class Reader:
    """Prefills a text once and answers questions about it, each from the same state.

    Attributes:
        seconds: times of all steps that chose a token of an answer.
        moved: pages, or single slots, that each of these steps fetched from the host.
        turn_seconds: times of the steps of the newest model's turn (`continue_with`).
    """

    def __init__(self, model, policy: icejax.CachePolicy, *, prompt_tokens: int, new_tokens: int) -> None:
        self._model = model
        self._plan = make_plan(model, policy, batch_size=1, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        self._decoding = DecodePrograms(model, self._plan)
        self._pool = self._extents = self._state = None
        self.seconds: list[float] = []
        self.moved: list[int] = []
        self.turn_seconds: list[float] = []

    def read(self, prompt: Sequence[int], layers: Iterable | None = None) -> None:
        """Prefills a new text, or takes its `layers` in the form of `keep_layers`, whose attention is already computed."""
        destination = None
        if self._plan.pooled:  # extents of one row, of its fork, and one scratch extent
            count = 2 * extents_for(self._plan.pool.pages) + 1
            if self._pool is None:
                self._pool = allocation.allocate(*self._plan.pool_sizes(count))
            self._extents = Extents(count)
            destination = self._pool, self._extents.take(self._plan.extents(len(prompt))[None])
        if layers is None:
            self._state, _, self._pool = prefill(self._model, [prompt], self._plan, into=destination)
        else:
            pool, table = destination or (None, None)
            table = None if table is None else jnp.asarray(table)
            x, states, self._pool = keep_layers(layers, self._plan, pool, table)
            first_draw = dict(sampling=(), draws=[(0, 0)])
            self._state, _ = first_state(self._model, [prompt], self._plan, x, states, table, **first_draw)
        self._decoding.clock = 0

    def continue_with(self, tokens: Sequence[int]) -> None:
        """Decodes these tokens as if the model had chosen them."""
        self.turn_seconds = []
        for token in tokens:
            started = time.perf_counter()
            self._force(token)
            self.turn_seconds.append(time.perf_counter() - started)

    def ask(self, question: Sequence[int], count: int) -> list[int]:
        """Returns the `count` tokens that the model chooses after a question; the cache of the text does not change."""
        text_state, clock = self._state, self._decoding.clock
        self._state, self._pool = fork(text_state, self._pool, self._extents, plan=self._plan)
        for token in question[:-1]:
            self._force(token)
        answer = [question[-1]]
        for _ in range(count):
            started = time.perf_counter()
            answer.append(self._force(answer[-1]))
            self.seconds.append(time.perf_counter() - started)
            self.moved.append(self._brought)
        if self._pool is not None:
            self._extents.give_back(np.asarray(self._state.cache.table))
        self._state, self._decoding.clock = text_state, clock
        return answer[1:]

    def force(self, tokens: Sequence[int]) -> tuple[np.ndarray, float]:
        """Decodes these tokens as if the model had chosen them.

        Returns:
            The logits after each token, f32[tokens, vocabulary], and the mean number of pages or slots fetched per step.
        """
        logits, fetched = [], []
        for token in tokens:
            self._force(token)
            logits.append(np.asarray(self._logits[0], np.float32))
            fetched.append(self._brought)
        return np.stack(logits), float(np.mean(fetched))

    def _force(self, token: int) -> int:
        """Decodes a token; returns the token that the model chooses next."""
        forced, done = jax.device_put((np.asarray([token], np.int32), np.asarray([False])), devices.device())
        state = dataclasses.replace(self._state, last_tokens=forced, done=done)
        self._state, step, self._pool = self._decoding.step(state, self._pool)
        self._logits, counters = step.logits, StepCounters.read(step.counters).row(0)
        self._brought = counters.pages_fetched
        return counters.token
