"""Who answers: a server over HTTP, or an engine in this process; and the requests that both get."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import h11
import numpy as np
from rich.console import Console

from bench.llama_cpp import text_tokens
from bench.serving.client import Http, Timed
from icejax.api.engine import Engine
from icejax.api.prompts import chat
from icejax.checks.errors import InputError
from icejax.commands import options, serve
from icejax.commands.loading import load
from icejax.engine.sampling import Sampling
from icejax.serving.parameters import NO_EOS
from icejax.serving.warm import warm_up

PAGE = ("/", "/page/main.js", "/page/style.css")
PASSAGE = 40  # tokens around a place that is clicked on


@dataclass(frozen=True)
class Question:
    """A prompt as text, and how many tokens its answer has."""

    text: str
    answer_tokens: int


class Subject(Protocol):
    """Who answers questions."""

    async def answer(self, question: Question) -> Timed:
        """Returns the answer to a question."""


@dataclass(frozen=True)
class OverHttp:
    """A server.

    Attributes:
        endless: fields of a request whose answer does not end before its last token. A server that does not know them ends it
            where the model does.
    """

    server: Http
    model: str
    is_chat: bool
    endless: Mapping[str, Any] = field(default_factory=lambda: dict(ignore_eos=True))

    def body(self, question: Question) -> dict[str, Any]:
        """Returns the body of a request."""
        common = dict(model=self.model, max_tokens=question.answer_tokens, temperature=0, **self.endless)
        if self.is_chat:
            return common | dict(messages=[dict(role="user", content=question.text)])
        return common | dict(prompt=question.text)

    @property
    def path(self) -> str:
        """The route that is asked."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    async def answer(self, question: Question, timed: Timed | None = None) -> Timed:
        return await self.server.answer(self.path, self.body(question), timed)

    async def look(self, question: Question) -> Timed:
        """Returns an answer that tells what it looks at, behind the other requests of the page, as a browser sends them."""
        asked = time.perf_counter()
        try:
            for path in PAGE:
                await self.server.get(path)
            about = json.loads(await self.server.get("/v1/icejax"))
            tokens = json.loads(await self.server.get("/tokenize", dict(prompt=question.text)))["tokens"]
            await self.server.get("/detokenize", dict(tokens=tokens[:PASSAGE]))
        except (InputError, h11.RemoteProtocolError) as error:
            return Timed(asked, error=str(error))
        return await self.server.answer(self.path, self.body(question) | dict(explain=about["can_explain"]))


@dataclass(frozen=True)
class InProcess:
    """An engine in this process, with the options of `icejax serve`."""

    engine: Engine
    tokenizer: Any
    sampling: Sampling
    is_chat: bool

    async def answer(self, question: Question) -> Timed:
        loop, timed, ends = asyncio.get_running_loop(), Timed(time.perf_counter()), asyncio.Event()

        def take(piece: Any) -> None:
            if piece is None or isinstance(piece, BaseException):
                timed.error = str(piece)
            else:
                if piece.text:
                    timed.times.append(time.perf_counter())
                timed.tokens, timed.prompt_tokens = timed.tokens + 1, piece.prompt_tokens
                timed.cached_tokens = piece.cached_tokens
                if piece.finish_reason is None:
                    return
            timed.over = time.perf_counter()
            loop.call_soon_threadsafe(ends.set)

        prompt = chat(self.tokenizer, question.text) if self.is_chat else question.text
        handle = self.engine.submit(prompt, max_new_tokens=question.answer_tokens, sampling=self.sampling)
        handle.listen(take)
        await ends.wait()
        return timed


@contextlib.contextmanager
def in_process(arguments: Sequence[str]) -> Iterator[InProcess]:
    """Runs an engine with the options of `icejax serve` until the block ends, warmed up as the server is."""
    parsed = serve.parser("icejax serve").parse_args(list(arguments))
    model, tokenizer = load(parsed, Console(stderr=True))
    sizes = options.memory_limits(parsed) | serve.engine_options(parsed)
    sampling = Sampling(logit_bias=dict.fromkeys(map(str, model.config.eos_token_ids), NO_EOS))
    with Engine(model, tokenizer, cache=options.policy(parsed), **sizes) as engine:
        warm_up(engine, tokens=parsed.warmup)
        yield InProcess(engine, tokenizer, sampling, tokenizer.chat_template is not None)


class Questions:
    """Questions about icejax's own source code; no two begin alike, so that no cached prefix serves two of them."""

    def __init__(self, tokenizer: Any, *, seed: int = 0) -> None:
        self._tokenizer, self._rng, self._count, self._texts = tokenizer, np.random.default_rng(seed), 0, {}

    def text(self, tokens: int) -> str:
        """Returns a text of about so many tokens."""
        if tokens not in self._texts:
            self._texts[tokens] = self._tokenizer.decode(text_tokens(self._tokenizer, max(tokens - 8, 1)))
        self._count += 1
        return f"# {self._rng.integers(10**9)} {self._count}\n{self._texts[tokens]}"

    def many(self, count: int, prompt_tokens: int, answer_tokens: int) -> list[Question]:
        """Returns questions of one size."""
        return [Question(self.text(prompt_tokens), answer_tokens) for _ in range(count)]

    def random(self, most_prompt: int, most_answer: int) -> Question:
        """Returns a question of random size."""
        shortest = min(16, most_prompt)
        prompt = int(np.exp(self._rng.uniform(np.log(shortest), np.log(most_prompt))))
        return Question(self.text(2 ** int(np.log2(prompt))), int(self._rng.integers(1, most_answer + 1)))


async def closed_loop(subject: Subject, questions: Sequence[Question], concurrency: int) -> tuple[list[Timed], float]:
    """Returns the answers to questions of which so many are always open, and the seconds that they took."""
    left, answers = iter(questions), []

    async def worker() -> None:
        for question in left:
            answers.append(await subject.answer(question))

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return answers, time.perf_counter() - started


async def open_loop(subject: Subject, questions: Sequence[Question], rate: float) -> tuple[list[Timed], float]:
    """Returns the answers to questions that come at random times, `rate` a second, and the seconds that they took."""
    rng, started, tasks = np.random.default_rng(0), time.perf_counter(), []
    due = started
    for question in questions:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(subject.answer(question)))
        due += rng.exponential(1 / rate)
    return list(await asyncio.gather(*tasks)), time.perf_counter() - started
