"""`/v1/messages` and `/v1/messages/count_tokens`: a chat as Anthropic's clients ask it. https://docs.claude.com/en/api/messages

The messages become those of a chat in the model's template, and tools and calls OpenAI's (`serving.tools.anthropic`). Thoughts
are blocks of type `thinking` without a signature.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from icejax.engine.request import Request as EngineRequest
from icejax.engine.response import GenerationResponse
from icejax.serving import parameters
from icejax.serving.answers import new_id
from icejax.serving.errors import ApiError
from icejax.serving.guard import owner_of, read_body
from icejax.serving.routes.chat import answer_grammar, chat_text
from icejax.serving.routes.turns import turns
from icejax.serving.schemas import MessagesRequest, parsed
from icejax.serving.service import Service
from icejax.serving.streaming import EventStream, json_response, named_event, whole_response
from icejax.serving.tools.anthropic import chat_of, tool_choice
from icejax.serving.tools.asked import arguments_object, asked_tools
from icejax.serving.tools.calls import Call, CallsOf
from icejax.serving.tools.events import CallArguments, CallBegin, Event
from icejax.text.chat_text import ChatText
from icejax.text.encode import encode

PING = named_event(dict(type="ping"))


async def messages(request: Request) -> Response:
    """Answers a chat."""
    service: Service = request.app.state.service
    service.check_ready()
    fields = parsed(MessagesRequest, await read_body(request))
    name, chat = service.check_model(fields.model), chat_of(fields)
    if fields.max_tokens is None:
        raise ApiError(400, "'max_tokens' is missing: expected it in the body", param="max_tokens")
    sampling = parameters.sampling_of(fields, service.sampling, service.model.config.eos_token_ids)
    limit = service.limit(fields, fields.max_tokens, default=1)
    options = parameters.answer_options(fields, sampling=sampling, limit=limit)
    options |= dict(cache_salt=parameters.salt_of(fields, owner_of(request)), parse_special=service.parse_special)
    choice, parallel = tool_choice(fields.tool_choice)
    asked_for = asked_tools(service.tokenizer, chat.tools, choice, parallel=parallel)
    grammar = answer_grammar(fields, asked_for)

    def make() -> list[tuple[EngineRequest, dict[str, Any]]]:
        return [(EngineRequest(prompt=_text(service, chat), grammar=grammar), options)]

    answers, calls = await service.submit(make, prompts=1, n=1), CallsOf(asked_for)
    about = dict(id=new_id("msg"), type="message", role="assistant", model=name)

    def usage() -> dict[str, int]:
        counts, cached = answers.usage, answers.usage.cached_tokens
        read = dict(cache_read_input_tokens=cached, cache_creation_input_tokens=0)
        return dict(input_tokens=counts.prompt_tokens - cached, output_tokens=counts.new_tokens) | read

    def ends(response: GenerationResponse) -> dict[str, Any]:
        is_end = calls.calls or grammar is not None or response.token_ids[-1] in service.model.config.eos_token_ids
        at_stop = bool(fields.stop) and response.finish_reason == "stop" and not is_end
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        reason = "stop_sequence" if at_stop else reasons[calls.reason(response)]
        only = fields.stop[0] if at_stop and len(fields.stop) == 1 else None  # of several, nobody knows which
        return dict(stop_reason=reason, stop_sequence=only)

    if not fields.stream:

        def body(responses: list[GenerationResponse]) -> dict[str, Any]:
            [response] = responses
            thoughts = [] if response.reasoning is None else [_block("thinking", response.reasoning)]
            texts = [_block("text", calls.text)] if calls.text or not calls.calls else []
            made = [_call_block(call) | {"input": _input(call)} for call in calls.calls]
            return about | dict(content=[*thoughts, *texts, *made]) | ends(response) | dict(usage=usage())

        return await whole_response(request, answers, service, body, read=lambda _, piece: calls.read(piece))

    blocks = _Blocks()

    def of_piece(_: int, piece: GenerationResponse) -> list[bytes]:
        events = []
        if piece.new_tokens == 1:  # the prompt's tokens are known from here on
            start = about | dict(content=[], stop_reason=None, stop_sequence=None, usage=usage())
            events.append(named_event(dict(type="message_start", message=start)))
        events += blocks.grown("thinking", piece.reasoning or "")
        for call, event in calls.read(piece):
            events += blocks.grown("text", event.text) if call is None else blocks.of_call(call, event)
        if piece.finish_reason is not None:
            events += [*blocks.ended(), named_event(dict(type="message_delta", delta=ends(piece), usage=usage()))]
            events.append(named_event(dict(type="message_stop")))
        return events or [PING]

    failed = lambda error: named_event(error.anthropic_body())  # noqa: E731
    return EventStream(answers, service, of_piece=of_piece, first=[PING], failed=failed, waits=lambda: PING, done=b"")


async def count_tokens(request: Request) -> Response:
    """Returns the number of tokens of a chat."""
    service: Service = request.app.state.service
    service.check_ready()
    fields = parsed(MessagesRequest, await read_body(request))
    service.check_model(fields.model)
    chat = chat_of(fields)
    count = await service.in_thread(lambda: len(encode(service.tokenizer, _text(service, chat))))
    return json_response(dict(input_tokens=count))


def _text(service: Service, chat: SimpleNamespace) -> ChatText:
    chat.messages = turns(service.tokenizer, chat.messages)
    return chat_text(service, chat)


class _Blocks:
    """The blocks of a streamed message: one for each run of thoughts or text, and for each call."""

    def __init__(self) -> None:
        self._kind, self._number = None, -1

    def grown(self, kind: str, text: str) -> list[bytes]:
        """Returns the events of new text of a kind; none if it is empty."""
        if not text:
            return []
        events = self._begun(kind, _block(kind, "")) if self._kind != kind else []
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def of_call(self, call: Call, event: Event) -> list[bytes]:
        """Returns the events of a call."""
        match event:
            case CallBegin():
                return self._begun("tool_use", _call_block(call))
            case CallArguments():
                return [self._delta({"type": "input_json_delta", "partial_json": event.text})]
        return self.ended()

    def _begun(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        ended = self.ended()
        self._kind, self._number = kind, self._number + 1
        return [*ended, named_event(dict(type="content_block_start", index=self._number, content_block=block))]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event(dict(type="content_block_delta", index=self._number, delta=delta))

    def ended(self) -> list[bytes]:
        """Returns the event that ends the present block; none if no block is open."""
        ends = [] if self._kind is None else [named_event(dict(type="content_block_stop", index=self._number))]
        self._kind = None
        return ends


def _block(kind: str, text: str) -> dict[str, str]:
    return {"type": kind, kind: text} | ({"signature": ""} if kind == "thinking" else {})


def _call_block(call: Call) -> dict[str, Any]:
    return dict(type="tool_use", id=call.id, name=call.name, input={})


def _input(call: Call) -> dict[str, Any]:
    """Returns a call's arguments; none if the answer's end has cut them."""
    value = arguments_object(call.arguments)
    return value if isinstance(value, dict) else {}
