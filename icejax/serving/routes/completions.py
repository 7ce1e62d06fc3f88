"""`/v1/completions`: texts after prompts, which are texts or token ids. https://platform.openai.com/docs/api-reference/completions

With `echo` and `logprobs` a choice has the log-probabilities of the prompt's own tokens too, from exact attention, which
lm-evaluation-harness sums. The names of control tokens in a prompt are these tokens, as in vLLM and llama.cpp, unless
`parse_special` is false; with a `suffix` they are text unless it is true.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from icejax.engine.request import Prompt
from icejax.engine.request import Request as EngineRequest
from icejax.engine.response import GenerationResponse, Logprob, TokenLogprobs
from icejax.serving import parameters
from icejax.serving.answers import new_id
from icejax.serving.errors import ApiError
from icejax.serving.explain import attention_of, explains
from icejax.serving.grammars import grammar_of
from icejax.serving.guard import owner_of, read_body
from icejax.serving.schemas import CompletionRequest, parsed
from icejax.serving.service import Service
from icejax.serving.streaming import EventStream, chunks, whole_response
from icejax.text.detokenize import UNFINISHED, decoded
from icejax.text.infill import NO_INFILL, infill, infill_ends, infill_form
from icejax.text.token_text import token_text

DEFAULT_TOKENS = 16  # OpenAI's


async def completions(request: Request) -> Response:
    """Answers prompts."""
    service: Service = request.app.state.service
    service.check_ready()
    fields = parsed(CompletionRequest, await read_body(request))
    name, n, prompts = service.check_model(fields.model), fields.n or 1, _prompts(fields.prompt)
    parameters.refuse_not_built(fields)
    if (fields.best_of or n) != n:
        raise ApiError(400, "best_of is not supported: leave it out, or give the value of n", param="best_of")
    if fields.echo and fields.logprobs is not None and fields.stream:
        raise ApiError(400, "echo with logprobs does not stream: leave stream out", param="stream")
    sampling = parameters.sampling_of(fields, service.sampling, service.model.config.eos_token_ids)
    limit = service.limit(fields, fields.max_tokens, default=DEFAULT_TOKENS)
    options = parameters.answer_options(fields, sampling=sampling, limit=limit)
    reading = dict(special_tokens=fields.add_special_tokens is not False, parse_special=fields.parse_special is not False)
    options |= dict(logprobs=fields.logprobs, cache_salt=parameters.salt_of(fields, owner_of(request)), **reading)
    scored = fields.logprobs if fields.echo else None
    asked = dict(grammar=grammar_of(fields), explain=explains(fields), whole_text=True)
    if fields.suffix:
        _check_suffix(service, fields, prompts)
        options["stop"] += infill_ends(service.tokenizer)
    echoed = [_echoed(service.tokenizer, prompt) if fields.echo else "" for prompt in prompts]
    firsts: list[str | None] = [None] * len(prompts)

    def make() -> list[tuple[EngineRequest, dict[str, Any]]]:
        if fields.suffix:
            parse = bool(fields.parse_special)
            texts = [infill(service.tokenizer, prompt, fields.suffix, parse_special=parse) for prompt in prompts]
            return [(EngineRequest(prompt=ids, **asked), options) for ids in texts]
        if scored is None:
            return [(EngineRequest(prompt=prompt, **asked), options) for prompt in prompts]
        tokens = [service.tokens(prompt, **reading) for prompt in prompts]
        firsts[:] = [_named(*token_text(service.tokenizer, ids[0])) for ids in tokens]
        return [(EngineRequest(prompt=ids, prompt_logprobs=scored, **asked), options) for ids in tokens]

    answers = await service.submit(make, prompts=len(prompts), n=n)
    about = dict(id=new_id("cmpl"), object="text_completion", created=int(time.time()), model=name)

    if not fields.stream:

        def body(responses: list[GenerationResponse]) -> dict[str, Any]:
            only_echo = fields.max_tokens == 0
            choices = [
                _choice(index, response, echoed[index // n], firsts[index // n], only_echo=only_echo)
                for index, response in enumerate(responses)
            ]
            if fields.max_tokens == 0:
                answers.usage.new_tokens = 0
            return about | dict(choices=choices, usage=answers.usage.body())

        return await whole_response(request, answers, service, body)

    offsets, begun = [len(text) for text in echoed for _ in range(n)], set[int]()
    chunk, last = chunks(about, answers.usage, fields.stream_options)

    def of_piece(index: int, piece: GenerationResponse) -> list[bytes]:
        text, reason = piece.text, piece.finish_reason
        if fields.max_tokens == 0:  # the answer has a token that was not asked for
            answers.usage.new_tokens, text, reason = 0, "", reason and "length"
        echo = echoed[index // n] if index not in begun else ""
        begun.add(index)
        logprobs = _logprobs(piece.logprobs, offset=offsets[index])
        offsets[index] += sum(len(token.chosen.text) for token in piece.logprobs or ())  # a stop string may hold text back
        choice = dict(index=index, text=echo + text, logprobs=logprobs, finish_reason=reason)
        return [chunk([choice | attention_of(piece)])]

    return EventStream(answers, service, of_piece=of_piece, last=last)


def _prompts(prompt: str | list[Any]) -> list[Prompt]:
    """Returns the prompts of a body; ApiError 400 if it has none, or an empty one."""
    prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    if not prompts or not all(prompts):
        raise ApiError(400, "prompt is empty: expected some text or token ids", param="prompt")
    return prompts


def _check_suffix(service: Service, fields: CompletionRequest, prompts: list[Prompt]) -> None:
    """Raises ApiError 400 if there is no text to be filled in before the suffix."""
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ApiError(400, "suffix needs prompts that are text, not token ids", param="suffix")
    if fields.echo:
        raise ApiError(400, "suffix and echo do not go together: leave one out", param="suffix")
    if infill_form(service.tokenizer) is None:
        raise ApiError(400, NO_INFILL, param="suffix")


def _echoed(tokenizer: Any, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else decoded(tokenizer, list(prompt))


def _choice(index: int, response: GenerationResponse, echoed: str, first: str | None, *, only_echo: bool) -> dict[str, Any]:
    """Returns a choice.

    Args:
        echoed: the prompt's text, which the choice begins with; empty: it does not.
        first: the name of the prompt's first token, which has no log-probability.
        only_echo: whether the answer, of one token, was not asked for.
    """
    text = echoed + ("" if only_echo else response.text)
    tokens = None if only_echo and response.logprobs is not None else response.logprobs
    if response.prompt_logprobs is None:
        logprobs = _logprobs(tokens, offset=len(echoed))
    else:
        logprobs = _logprobs([*response.prompt_logprobs, *(tokens or ())], offset=0, first=first)
    reason = "length" if only_echo else response.finish_reason
    return dict(index=index, text=text, logprobs=logprobs, finish_reason=reason) | attention_of(response)


def _logprobs(tokens: Sequence[TokenLogprobs] | None, *, offset: int, first: str | None = None) -> dict[str, Any] | None:
    """Returns the log-probabilities as lists with an entry per token; None if there are none.

    Args:
        offset: characters before the first token.
        first: the name of a token before the others, which has no log-probability.
    """
    if tokens is None:
        return None
    names = ([] if first is None else [first]) + [_name(token.chosen) for token in tokens]
    texts = ([] if first is None else [first]) + [token.chosen.text for token in tokens]
    nothing = [] if first is None else [None]
    offsets = [offset]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    return dict(
        tokens=names,
        token_logprobs=nothing + [token.chosen.logprob for token in tokens],
        top_logprobs=nothing + [_top(token) for token in tokens],
        text_offset=offsets[: len(names)],
    )


def _top(token: TokenLogprobs) -> dict[str, float]:
    """Returns the most likely tokens by name, and the chosen one, as OpenAI does; of equal names the likelier one."""
    top = {_name(one): one.logprob for one in reversed(token.top)}
    return top if _name(token.chosen) in top else top | {_name(token.chosen): token.chosen.logprob}


def _name(token: Logprob) -> str:
    """Returns a token's text; OpenAI's form of its bytes, such as `bytes:\\xe2\\x80`, for a part of a character."""
    return _named(token.text, token.bytes)


def _named(text: str, content: Sequence[int]) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content) if UNFINISHED in text else text
