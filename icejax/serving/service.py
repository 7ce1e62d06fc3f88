"""What the endpoints share: the model and its engine, the options of the server, and what it does at the moment.

`lifecycle` makes one and gives it the engine when the model has loaded.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio.to_thread

from icejax.api.engine import Engine
from icejax.api.prompts import encode_prompts
from icejax.checks.errors import quoted
from icejax.engine.request import Prompt, Request
from icejax.engine.serving.thread import Handle
from icejax.models.decoder import CausalLM
from icejax.serving.answers import Answers
from icejax.serving.errors import ApiError
from icejax.serving.metrics import Metrics
from icejax.serving.schemas import AnswerFields

LOG = logging.getLogger(__name__)
Result = TypeVar("Result")


class Phase(enum.Enum):
    """What the server does; only a ready one takes requests."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(kw_only=True)
class Service:
    """A model that is served.

    Attributes:
        names: the names that requests know the model by; the first is its own.
        root: the path or hub id that it was loaded from.
        keys: the API keys; empty: none is asked for.
        places: rows that decode at once.
        max_queue: answers that may wait.
        sampling: sampling options of requests that leave them open.
        template_arguments: variables of the chat template, likewise.
        parse_special: whether names of control tokens in messages are these tokens, likewise.
        hosts: names of this host that requests must come to; empty: any.
        fail: called once with the error of an engine that has failed.
        created: unix time of the start.
        phase, engine, model, tokenizer: set while the server starts.
    """

    names: tuple[str, ...]
    root: str
    keys: tuple[str, ...] = ()
    places: int = 4
    max_queue: int = 256
    sampling: Mapping[str, Any] = field(default_factory=dict)
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    parse_special: bool = False
    hosts: tuple[str, ...] = ()
    fail: Callable[[BaseException], None] = lambda error: None
    created: int = field(default_factory=lambda: int(time.time()))
    phase: Phase = Phase.LOADING
    model: CausalLM | None = None
    tokenizer: Any = None
    engine: Engine | None = None
    body_limit: int = 2**20

    def __post_init__(self) -> None:
        self.metrics, self._open, self._submitting = Metrics(self.names[0]), set[Answers](), 0

    @property
    def open_answers(self) -> int:
        """The number of answers that run, wait or are being submitted."""
        return self._submitting + sum(answers.count for answers in self._open)

    def check_ready(self) -> None:
        """Raises ApiError 503 if the server takes no requests."""
        if self.phase is not Phase.READY:
            raise ApiError(503, f"the server is {self.phase.value}: try again later", code=self.phase.value)

    def check_model(self, name: str | None) -> str:
        """Returns the name of the model that a request asks for; ApiError 404 if it is another model."""
        if name is not None and name not in self.names:
            message = f"there is no model {quoted(name)}: expected {' or '.join(self.names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name or self.names[0]

    def limit(self, fields: AnswerFields, asked: int | None, *, default: int) -> int:
        """Returns the most tokens of an answer: as asked for, but no more than a row has room for."""
        if asked == 0 and not getattr(fields, "echo", None):
            raise ApiError(400, "max_tokens must be at least 1, got 0", param="max_tokens")
        return max(1, min(default if asked is None else asked, self.engine.max_new_tokens))

    async def submit(self, make: Callable[[], Sequence[tuple[Prompt, dict[str, Any]]]], *, prompts: int, n: int) -> Answers:
        """Puts prompts into the engine's queue.

        Args:
            make: called in another thread, since chat templates and tokenizers take time; returns each prompt with the options
                of `Engine.submit`.
            prompts, n: number of prompts, and of answers to each.

        Raises:
            ApiError: 400 if so many answers can never wait together, 429 if too many wait now, 503 if the server drains.
            InputError, RuntimeError: as in `Engine.submit`.
        """
        self.check_ready()  # it may have begun to drain while the body came
        most, count = self.places + self.max_queue, prompts * n
        if count > most:
            raise ApiError(400, f"the request asks for {count} answers and the server takes {most} at once: ask for fewer")
        if self.open_answers + count > most:
            self.metrics.rejected()
            raise ApiError(429, f"{self.max_queue} answers wait already, as many as may: try again later", code="queue_full")
        self._submitting += count
        try:
            answers = Answers(await self.in_thread(lambda: self._handles(make(), n)), n, self.metrics)
        finally:
            self._submitting -= count
        self._open.add(answers)
        return answers

    def cancel_all(self) -> None:
        """Cancels all requests."""
        for answers in self._open:
            answers.cancel()

    def close(self, answers: Answers) -> None:
        """Forgets a request that is over, and cancels the rest of it."""
        answers.cancel()
        self._open.discard(answers)

    def tokens(self, prompt: Prompt, *, special_tokens: bool, parse_special: bool) -> list[int]:
        """Returns the token ids of a prompt; errors are those of `encode_prompts`."""
        asked = [Request(prompt=prompt, index=0)]
        options = dict(special_tokens=special_tokens, parse_special=parse_special)
        return encode_prompts(self.model, self.tokenizer, asked, context_length=self.engine.context_length, **options)[0]

    def failed_on(self, error: BaseException) -> None:
        """Takes an unexpected error of a request: logs its type alone, and stops the server if the engine has failed."""
        if self.engine is None or self.engine.failure is None:  # which the engine has told of
            LOG.error("a request failed: %s", type(error).__name__)
        self.look_at_engine()

    def look_at_engine(self) -> None:
        """Stops the server if the engine has failed."""
        if self.engine is not None and self.engine.failure is not None and self.phase is not Phase.FAILED:
            self.phase = Phase.FAILED
            self.fail(self.engine.failure)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Returns what `work` returns, which another thread runs."""
        return await anyio.to_thread.run_sync(work)

    def _handles(self, asked: Sequence[tuple[Prompt, dict[str, Any]]], n: int) -> list[Handle]:
        """Submits prompts; if one is refused, none is left in the engine."""
        handles: list[Handle] = []
        try:
            for prompt, options in asked:
                handles.append(self.engine.submit(prompt, n=n, **options))
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return handles
