"""Several caches of one model that answer the same requests, each prompt after one exact prefill.

The harness asks `Together`, and every cache's `HarnessModel` records its own answers, as `icejax evaluate` does. A run of
`icejax evaluate` with one of the caches then reads all answers, and only scores them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance

from bench.evaluation.exact import shared_prefill
from icejax.api.jobs import jobs_of
from icejax.cache.protocol import CachePolicy
from icejax.cache.registry import display_name
from icejax.checks.errors import InputError
from icejax.engine.request import AnswerOptions, Request, requests
from icejax.engine.response import GenerationResponse
from icejax.engine.serving.core import Core
from icejax.engine.serving.job import CoreSizes
from icejax.evaluation.harness import HarnessModel
from icejax.models.decoder import CausalLM

NEW_TOKENS = 512  # room for an answer, the same for all tasks, because each size compiles its own programs
NO_TIMES = dict(ttft_s=None, compile_s=None, tpot_s=None)  # those of a shared prefill are of no cache alone


class Together(HarnessModel):
    """The harness's model that asks several others; its own answers are the first one's."""

    def __init__(self, models: list[HarnessModel], folder: Path, tell: Callable[[str], None]) -> None:
        """Takes models that differ in their caches alone.

        Args:
            folder: where files may stand while a prompt is answered.
            tell: called with a line for each group of requests and each cache.
        """
        first = models[0]
        sizes = dict(batch_size=first.batch_size, max_length=first.max_length, max_gen_toks=first.max_gen_toks)
        super().__init__(first.model, first.tokenizer, cache=first.cache, answers=first.answers, **sizes)
        self._models, self._folder, self._tell = models, folder, tell

    def converse(self, requests: list[Instance], disable_tqdm: bool = False) -> list[list[str]]:
        """Returns the answers to questions about texts; the first text with its question is prefilled once for all caches."""
        for number, request in enumerate(requests, 1):
            self._ask(1, f"session {number} of {len(requests)}", lambda one, asked=request: one.converse([asked], True))
        return super().converse(requests, disable_tqdm)

    def _answered(
        self,
        asked: list[tuple[Request, list]],
        tasks: list[str | None],
        read: Callable[[GenerationResponse], Any],
        what: str,
        quiet: bool,
    ) -> list[Any]:
        by_key = {self.answers.key(item[0][1]): item for item in zip(asked, tasks, strict=True)}
        waiting = [item for key, item in by_key.items() if any(key not in one.answers for one in self._models)]
        waiting.sort(key=lambda item: len(item[0][0].prompt))
        for first in range(0, len(waiting), self.batch_size):
            group, group_tasks = zip(*waiting[first : first + self.batch_size], strict=True)
            most = max(len(request.prompt) for request, _ in group)
            line = f"{first + len(group)} of {len(waiting)} {what}, prompts of at most {most} tokens"
            inputs = list(group), list(group_tasks), read, what, True
            self._ask(len(group), line, lambda one, inputs=inputs: one._answered(*inputs))
        return super()._answered(asked, tasks, read, what, quiet)

    def _ask(self, prompts: int, line: str, ask: Callable[[HarnessModel], Any]) -> None:
        """Asks every model, after one prefill of each of the `prompts`."""
        with shared_prefill(prompts, self._folder):
            for one in self._models:
                started = time.perf_counter()
                ask(one)
                budget = "" if one.cache.budget is None else f" {one.cache.budget}"
                self._tell(f"{line}: {display_name(one.cache)}{budget}, {time.perf_counter() - started:.1f} s")


def stream(model: CausalLM, tokenizer: Any, prompt_tokens: int) -> Callable[..., Iterator[GenerationResponse]]:
    """Returns what answers requests as `icejax.stream_generate` does, in a batch whose size does not depend on them.

    The responses have no times.

    Args:
        prompt_tokens: size of a prompt in the batch, at least.
    """

    def answer(
        asked: list[Request], *, cache: CachePolicy, batch_size: int, context_length: int, host_memory_limit: int | None
    ) -> Iterator[GenerationResponse]:
        jobs = jobs_of(model, tokenizer, requests(asked), AnswerOptions(), n=1, context_length=context_length)
        size = max(prompt_tokens, *(len(job.tokens) for job in jobs))
        new = max(NEW_TOKENS, *(job.limit for job in jobs))
        sizes = CoreSizes(
            places=batch_size, prompt_tokens=size, new_tokens=new, prompts=(size,) * batch_size, joins=len(jobs) > batch_size
        )
        core = Core(model, tokenizer, cache, sizes, host_memory_limit=host_memory_limit)
        for job in jobs:
            core.submit(job)
        while core.busy:
            for _, outcome in core.step():
                if isinstance(outcome, InputError):
                    raise outcome
                yield replace(outcome, **NO_TIMES)

    return answer
