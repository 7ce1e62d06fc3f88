"""Requests to jobs of the engine: checks options, tokenizes prompts. `api.generate` and `api.engine` call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from icejax.api.prompts import encode_prompts
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer
from icejax.engine.request import AnswerOptions, Request
from icejax.engine.sampling import check_bias
from icejax.engine.serving.job import Job
from icejax.models.decoder import CausalLM
from icejax.runtime.compile_clock import Mark
from icejax.text.detokenize import check_stops
from icejax.text.grammar.matcher import compiled

MOST_SAMPLES = 1024  # answers to a prompt
SAMPLE_STEP = 2654435761  # between the indices of a prompt's answers, so that prompts that follow draw differently


def jobs_of(
    model: CausalLM, tokenizer: Any, prompts: Sequence[Request], answer: AnswerOptions, *, n: int, context_length: int
) -> list[Job]:
    """Returns `n` jobs for each prompt, all of which have been checked; `answer` has the options of the call."""
    integer("n", n, most=MOST_SAMPLES)
    answers = [request.options(answer) for request in prompts]
    for request, row_answer in zip(prompts, answers, strict=True):
        check_bias(row_answer.sampling, model.config.vocab_size, place=f"prompt {request.index + 1}: ")
        check_stops(tokenizer, row_answer.stop, place=f"prompt {request.index + 1}: ")
    started, jobs = Mark.now(), []
    texts = dict(context_length=context_length, special_tokens=answer.special_tokens, parse_special=answer.parse_special)
    for i, (request, options) in enumerate(zip(prompts, answers, strict=True)):
        tokens = np.asarray(encode_prompts(model, tokenizer, [request], **texts)[0], np.int32)
        limit = min(options.max_new_tokens, context_length - len(tokens))
        forced = request.forced_tokens or ()
        if limit < len(forced):
            raise InputError(
                f"prompt {request.index + 1} has {len(tokens)} tokens and {len(forced)} forced ones: "
                f"expected at most {context_length} in all, the context length"
            )
        if max(forced, default=0) >= model.config.vocab_size:
            raise InputError(
                f"prompt {request.index + 1}: forced_tokens has {max(forced)} and the model knows {model.config.vocab_size}: "
                "give token ids of this model"
            )
        seed, index = (answer.seed, request.index) if request.seed is None else (request.seed, 0)
        fields = dict(tokens=tokens, options=options, limit=limit, started=started, index=i, number=request.index + 1)
        fields |= dict(forced=forced, prompt_logprobs=request.prompt_logprobs, explain=request.explain, grammar=request.grammar)
        fields |= dict(whole_text=request.whole_text)
        matcher = None
        if request.grammar is not None:
            known = dict(eos=model.config.eos_token_ids, vocabulary=model.config.vocab_size)
            matcher = compiled(request.grammar, tokenizer, tokens.tolist(), **known)
        for sample in range(n):
            draw = seed, (index + sample * SAMPLE_STEP) % 2**32
            fields |= dict(matcher=matcher if matcher is None or not sample else matcher.copy())
            jobs.append(Job(draw=draw, sample=sample, samples=n, salt=str(i), **fields))  # a text depends on its prompt alone
    return jobs
