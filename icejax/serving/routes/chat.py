"""`/v1/chat/completions`: a chat in the model's template, and the model's answer. https://platform.openai.com/docs/api-reference/chat

With `tools` the answer has calls, read in the model's own form (`serving.tools`). A last message of the assistant is continued.
The model's thoughts are `reasoning` and, by another name that clients know, `reasoning_content`; the content leaves them out.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from icejax.api.prompts import chat
from icejax.engine.request import Request as EngineRequest
from icejax.engine.response import GenerationResponse, Logprob, TokenLogprobs
from icejax.serving import parameters
from icejax.serving.answers import new_id
from icejax.serving.errors import ApiError
from icejax.serving.explain import attention_of, explains
from icejax.serving.grammars import grammar_of
from icejax.serving.guard import owner_of, read_body
from icejax.serving.parameters import checked
from icejax.serving.schemas import AnswerFields, ChatRequest, parsed
from icejax.serving.service import Service
from icejax.serving.streaming import EventStream, chunks, whole_response
from icejax.serving.tools.asked import Asked, asked_tools, with_calls
from icejax.serving.tools.calls import Call, CallsOf
from icejax.serving.tools.events import CallArguments, CallBegin, Event, Text
from icejax.serving.tools.form import Form
from icejax.serving.tools.forms import form_of
from icejax.text.chat_messages import KEYS, Message
from icejax.text.chat_text import ChatText
from icejax.text.grammar.rules import Grammar

ROLES = {"developer": "system"}  # OpenAI's newer name
NO_LIMIT = 2**31 - 1


async def chat_completions(request: Request) -> Response:
    """Answers a chat."""
    service: Service = request.app.state.service
    service.check_ready()
    fields = parsed(ChatRequest, await read_body(request))
    name, n = service.check_model(fields.model), fields.n or 1
    _refuse(fields)
    asked_for = asked_tools(service.tokenizer, fields.tools, fields.tool_choice, parallel=fields.parallel_tool_calls)
    grammar = answer_grammar(fields, asked_for)
    sampling = parameters.sampling_of(fields, service.sampling, service.model.config.eos_token_ids)
    asked = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    options = parameters.answer_options(fields, sampling=sampling, limit=service.limit(fields, asked, default=NO_LIMIT))
    parse_special = service.parse_special if fields.parse_special is None else fields.parse_special
    options |= dict(cache_salt=parameters.salt_of(fields, owner_of(request)), parse_special=parse_special)
    if fields.logprobs:
        options["logprobs"] = fields.top_logprobs or 0
    explain = explains(fields)

    def make() -> list[tuple[EngineRequest, dict[str, Any]]]:
        return [(EngineRequest(prompt=chat_text(service, fields), grammar=grammar, explain=explain), options)]

    answers = await service.submit(make, prompts=1, n=n)
    readers = [CallsOf(asked_for) for _ in range(n)]
    about = dict(id=new_id("chatcmpl"), created=int(time.time()), model=name)

    if not fields.stream:

        def body(responses: list[GenerationResponse]) -> dict[str, Any]:
            choices = [_choice(index, response, readers[index]) for index, response in enumerate(responses)]
            return about | dict(object="chat.completion", choices=choices, usage=answers.usage.body())

        return await whole_response(request, answers, service, body, read=lambda index, piece: readers[index].read(piece))

    about |= dict(object="chat.completion.chunk")
    chunk, last = chunks(about, answers.usage, fields.stream_options)

    def delta(index: int, content: dict[str, Any], response: GenerationResponse | None = None) -> dict[str, Any]:
        reason, logprobs = (None, None) if response is None else (readers[index].reason(response), _logprobs(response.logprobs))
        return dict(index=index, delta=content, logprobs=logprobs, finish_reason=reason)

    def of_piece(index: int, piece: GenerationResponse) -> list[bytes]:
        content = _delta(readers[index].read(piece)) | _thoughts(piece)
        return [chunk([delta(index, content, piece) | attention_of(piece)])]

    first = [chunk([delta(index, dict(role="assistant", content=""))]) for index in range(n)]
    return EventStream(answers, service, first=first, of_piece=of_piece, last=last)


def chat_text(service: Service, fields: Any) -> ChatText:
    """Returns the messages of a body in the model's chat template; ApiError 400 if it refuses them."""
    effort, template = getattr(fields, "reasoning_effort", None), str(service.tokenizer.chat_template)
    # A name that the template does not have has no effect, and a client's names are not logged.
    own = {name: value for name, value in (fields.chat_template_kwargs or {}).items() if name in template}
    variables = dict(service.template_arguments) | own
    if effort is not None and "reasoning_effort" in template:
        variables.setdefault("reasoning_effort", effort)
    elif effort == "none" and "enable_thinking" in template:
        variables.setdefault("enable_thinking", False)
    form = form_of(service.tokenizer)
    messages, tools = [_message(message, form) for message in fields.messages], getattr(fields, "tools", None)
    return checked("messages", lambda: chat(service.tokenizer, messages, tools=tools, chat_template_kwargs=variables or None))


def _refuse(fields: ChatRequest) -> None:
    """Raises ApiError 400 for a field that asks for more than is built."""
    parameters.refuse_not_built(fields)
    if set(fields.modalities or ["text"]) != {"text"}:
        raise ApiError(400, "modalities must be ['text']: other answers are not supported", param="modalities")
    if fields.top_logprobs and not fields.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")


def answer_grammar(fields: AnswerFields, asked_for: Asked | None) -> Grammar | None:
    """Returns the grammar of the answers; ApiError 400 if a call and another form are required."""
    grammar = grammar_of(fields)
    call = None if asked_for is None else checked("tools", asked_for.grammar)
    if grammar is not None and call is not None:
        raise ApiError(
            400,
            "the request asks for a call, or has strict tools, and has response_format: give one of them",
            param="response_format",
        )
    return grammar or call


def _message(message: Message, form: Form | None) -> Message:
    """Returns a message with the keys that a template reads; parts of a content lose all but their text."""
    known = {key: value for key, value in message.items() if key in KEYS}
    if known.get("reasoning") is not None:
        known.pop("reasoning_content", None)
    if isinstance(role := known.get("role"), str):
        known["role"] = ROLES.get(role, role)
    if isinstance(content := known.get("content"), list):
        known["content"] = [_part(part) for part in content]
    return with_calls(known, form)


def _part(part: Any) -> Any:
    is_text = isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text")
    return {"type": "text", "text": part.get("text")} if is_text else part


def _choice(index: int, response: GenerationResponse, calls: CallsOf) -> dict[str, Any]:
    message = dict(role="assistant", content=calls.text or (None if calls.calls else ""), refusal=None) | _thoughts(response)
    if calls.calls:
        message["tool_calls"] = [
            dict(id=call.id, type="function", function=dict(name=call.name, arguments=call.arguments)) for call in calls.calls
        ]
    choice = dict(index=index, message=message, logprobs=_logprobs(response.logprobs), finish_reason=calls.reason(response))
    return choice | attention_of(response)


def _delta(events: list[tuple[Call | None, Event]]) -> dict[str, Any]:
    """Returns what a piece adds to a message: text, and for each of its calls what is new."""
    calls: dict[int, dict[str, Any]] = {}
    for call, event in events:
        if isinstance(event, CallBegin):
            function = dict(name=event.name, arguments="")
            calls[event.index] = dict(index=event.index, id=call.id, type="function", function=function)
        elif isinstance(event, CallArguments):
            entry = calls.setdefault(event.index, dict(index=event.index, function=dict(arguments="")))
            entry["function"]["arguments"] += event.text
    text = "".join(event.text for _, event in events if isinstance(event, Text))
    return (dict(content=text) if text or not calls else {}) | (dict(tool_calls=[*calls.values()]) if calls else {})


def _thoughts(response: GenerationResponse) -> dict[str, str]:
    if response.reasoning is None:
        return {}
    return dict(reasoning=response.reasoning, reasoning_content=response.reasoning)


def _logprobs(tokens: tuple[TokenLogprobs, ...] | None) -> dict[str, Any] | None:
    """Returns OpenAI's object of log-probabilities."""
    if tokens is None:
        return None
    return dict(content=[logprob(token) for token in tokens], refusal=None)


def logprob(token: TokenLogprobs) -> dict[str, Any]:
    """Returns OpenAI's object of a token's log-probability, and of the likeliest tokens in its place."""
    return _logprob(token.chosen) | dict(top_logprobs=[*map(_logprob, token.top)])


def _logprob(token: Logprob) -> dict[str, Any]:
    return dict(token=token.text, logprob=token.logprob, bytes=list(token.bytes))
