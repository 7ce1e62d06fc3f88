"""Engines whose answers a test gives: one without a model, and one whose model can write nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import icejax
from icejax.engine.response import GenerationResponse
from icejax.engine.serving.scheduler import Load
from icejax.engine.serving.thread import Handle
from icejax.text.encode import encode

OPEN = (  # fields of a response that tell nothing here
    "logprobs prompt_logprobs attention tpot_s decode_tps hit_rate estimated_error budget_used expert_hit_rate "
    "expert_bytes_per_token run"
).split()
ZERO = "row sample cached_tokens ttft_s compile_s prefill_tps full_kv_bytes pages_selected pages_fetched".split()
NOTHING = dict.fromkeys(OPEN) | dict.fromkeys(ZERO, 0)


class Given:
    """What the server asks of an engine: the text of `script` comes next, a character as a token; `prompts` has the prompts."""

    failure, load = None, Load()

    def __init__(self, tokenizer: Any, *, context_length: int, max_new_tokens: int) -> None:
        self._tokenizer, self.script, self.prompts = tokenizer, list[str](), list[str]()
        self.context_length, self.max_new_tokens = context_length, max_new_tokens

    def submit(self, request: icejax.Request, **options: Any) -> Handle:
        self.prompts.append(str(request.prompt))
        handle, text = Handle(lambda handle: None, 1), self.script.pop(0)
        prompt_tokens = len(encode(self._tokenizer, request.prompt))
        for number, character in enumerate(text, 1):
            reason = "stop" if number == len(text) else None
            counts = dict(prompt_tokens=prompt_tokens, new_tokens=number, finish_reason=reason)
            handle.put(GenerationResponse(text=character, reasoning=None, token_ids=(0,), **counts, **NOTHING))
        return handle

    def close(self) -> None:
        pass


class Bound(icejax.Engine):
    """An engine whose model writes the texts of `script`, because a grammar leaves it nothing else."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.script, self.prompts = list[str](), list[str]()

    def submit(self, request: icejax.Request, **options: Any) -> Handle:
        self.prompts.append(str(request.prompt))
        return super().submit(replace(request, grammar=icejax.Grammar.choice([self.script.pop(0)])), **options)
