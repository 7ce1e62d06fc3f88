"""A model in an engine, its prompts, and requests whose tokens get the time at which a caller reads them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import icejax
from icejax.api.generate import ASSETS
from icejax.cache.protocol import CachePolicy
from icejax.checks.errors import InputError
from icejax.engine.response import GenerationResponse
from icejax.models.decoder import CausalLM
from icejax.runtime.compile_clock import clock

Timed = TypeVar("Timed")


def size(default: int, text: str, *, least: int = 1) -> Any:
    """Returns a field of `Sizes`: its default, its line of help and its least value."""
    return field(default=default, metadata=dict(help=text, least=least))


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of all parts. Each field is a flag of the command."""

    batch: int = size(8, "batch, lines: rows that decode at once", least=2)
    prompt_tokens: int = size(1024, "batch, prefill: tokens of the prompt of a row that decodes")
    steps: int = size(64, "batch, prefill: decode steps that are timed without a prefill", least=2)
    rows: int = size(4, "prefill: rows that decode beside the prefill")
    long_prompt: int = size(8192, "prefill: tokens of the prompt that is prefilled beside them")
    row_tokens: int = size(2048, "prefill: room for the answers of these rows, which must outlast the prefill")
    lines: int = size(64, "lines: requests")
    least_prompt: int = size(20, "lines: tokens of the shortest prompt")
    most_prompt: int = size(2000, "lines: tokens of the longest prompt")
    least_answer: int = size(8, "lines: tokens of the shortest answer")
    most_answer: int = size(256, "lines: tokens of the longest answer")
    document: int = size(16384, "prefix: tokens of the document")
    question: int = size(64, "prefix: tokens of a question about it")
    prefix_memory: int = size(2**31, "prefix: bytes of the store")
    repeats: int = size(3, "timed rounds that medians are of, after one that is not timed")

    def __post_init__(self) -> None:
        for name in ("prompt", "answer"):
            shortest, longest = (getattr(self, f"{end}_{name}") for end in ("least", "most"))
            if shortest > longest:
                raise InputError(f"--least-{name} must be at most --most-{name}, {longest}, got {shortest}")


class Subject:
    """A model without an end-of-text token, so that answers have as many tokens as were asked for; and its cache policy."""

    def __init__(self, folder: Path | str | None, policy: CachePolicy, *, dtype: str | None = None) -> None:
        """Loads a folder or a hub id; None: the bundled model.

        Raises:
            InputError: the checkpoint cannot be loaded.
        """
        self.model, self.tokenizer = icejax.load(folder or ASSETS, dtype=dtype)
        self.model.config = replace(self.model.config, eos_token_ids=())
        self.policy = policy
        self._rng = np.random.default_rng(0)

    @property
    def models(self) -> tuple[CausalLM, Any]:
        """The model and its tokenizer."""
        return self.model, self.tokenizer

    def engine(self, *, context: int, answer: int, **options: Any) -> icejax.Engine:
        """Starts an engine whose rows have room for `context` tokens, with answers of at most `answer` tokens."""
        return icejax.Engine(*self.models, cache=self.policy, context_length=context, max_new_tokens=answer, **options)

    def prompt(self, tokens: int) -> list[int]:
        """Returns as many random token ids, other ones at every call."""
        return self._rng.integers(0, min(self.model.config.vocab_size, len(self.tokenizer)), tokens).tolist()


def timed(run: Callable[[], Timed], repeats: int) -> tuple[list[Timed], dict[str, float]]:
    """Returns the results of rounds after one that is not timed, and `compile_s`: the seconds that they traced and compiled."""
    run()
    before = clock().seconds
    return [run() for _ in range(repeats)], dict(compile_s=clock().seconds - before)


class Asked:
    """A request to an engine. A thread of its own reads the answer, as a client does.

    Attributes:
        asked: when it was submitted, in seconds of `time.perf_counter`, as all times here.
        times: when each token was read.
        newest: the newest piece of the answer.
    """

    def __init__(self, engine: icejax.Engine, prompt: list[int], new_tokens: int) -> None:
        self.times, self.newest = list[float](), None
        self._changed, self._is_over, self._error = threading.Condition(), False, None
        self.asked = time.perf_counter()
        self._handle = engine.submit(prompt, max_new_tokens=new_tokens)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.asked

    def wait(self, tokens: int) -> Asked:
        """Waits until so many tokens have been read.

        Raises:
            InputError: the answer ends before, or the request fails.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self.times) >= tokens or self._is_over)
        if self._error is not None:
            raise self._error
        if len(self.times) < tokens:
            raise InputError(f"a row ended after {len(self.times)} tokens, before its round did: raise --row-tokens")
        return self

    def cancel(self) -> None:
        """Ends the request, and waits until its row is free."""
        self._handle.cancel()
        self._thread.join()

    def _read(self) -> None:
        try:
            for piece in self._handle:
                self._note(piece)
        except (InputError, RuntimeError) as error:
            self._error = error
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _note(self, piece: GenerationResponse) -> None:
        with self._changed:
            self.times.append(time.perf_counter())
            self.newest = piece
            self._changed.notify_all()
