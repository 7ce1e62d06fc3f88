"""`/v1/messages` and `/v1/messages/count_tokens`: a chat as Anthropic's clients ask it. https://docs.claude.com/en/api/messages

The messages become those of a chat in the model's template. Thoughts are blocks of type `thinking` without a signature.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from icejax.checks.errors import quoted
from icejax.engine.response import GenerationResponse
from icejax.serving import parameters
from icejax.serving.errors import ApiError
from icejax.serving.guard import owner_of, read_body
from icejax.serving.identity import new_id
from icejax.serving.routes.chat import chat_text
from icejax.serving.schemas import MessagesRequest, parsed
from icejax.serving.service import Service
from icejax.serving.streaming import EventStream, json_response, named_event, whole_response
from icejax.text.chat_messages import Message
from icejax.text.encode import encode


async def messages(request: Request) -> Response:
    """Answers a chat."""
    service: Service = request.app.state.service
    service.check_ready()
    fields = parsed(MessagesRequest, await read_body(request))
    name, chat = service.check_model(fields.model), _chat(fields)
    if fields.max_tokens is None:
        raise ApiError(400, "'max_tokens' is missing: expected it in the body", param="max_tokens")
    sampling = parameters.sampling_of(fields, service.sampling, service.model.config.eos_token_ids)
    limit = service.limit(fields, fields.max_tokens, default=1)
    options = parameters.answer_options(fields, sampling=sampling, limit=limit)
    options |= dict(cache_salt=parameters.salt_of(fields, owner_of(request)), parse_special=service.parse_special)
    answers = await service.submit(lambda: [(chat_text(service, chat), options)], prompts=1, n=1)
    about = dict(id=new_id("msg"), type="message", role="assistant", model=name)

    def usage() -> dict[str, int]:
        counts, cached = answers.usage, answers.usage.cached_tokens
        read = dict(cache_read_input_tokens=cached, cache_creation_input_tokens=0)
        return dict(input_tokens=counts.prompt_tokens - cached, output_tokens=counts.new_tokens) | read

    def ends(response: GenerationResponse) -> dict[str, Any]:
        at_stop = response.finish_reason == "stop" and response.token_ids[-1] not in service.model.config.eos_token_ids
        reason = "stop_sequence" if at_stop else {"stop": "end_turn", "length": "max_tokens"}[response.finish_reason]
        only = fields.stop[0] if at_stop and len(fields.stop) == 1 else None  # of several, nobody knows which
        return dict(stop_reason=reason, stop_sequence=only)

    if not fields.stream:

        def body(responses: list[GenerationResponse]) -> dict[str, Any]:
            [response] = responses
            thoughts = [] if response.reasoning is None else [_block("thinking", response.reasoning)]
            return about | dict(content=[*thoughts, _block("text", response.text)]) | ends(response) | dict(usage=usage())

        return await whole_response(request, answers, service, body)

    blocks = _Blocks()

    def of_piece(_: int, piece: GenerationResponse) -> list[bytes]:
        events = []
        if piece.new_tokens == 1:  # the prompt's tokens are known from here on
            start = about | dict(content=[], stop_reason=None, stop_sequence=None, usage=usage())
            events.append(named_event(dict(type="message_start", message=start)))
        events += blocks.grown("thinking", piece.reasoning or "") + blocks.grown("text", piece.text)
        if piece.finish_reason is not None:
            events += [*blocks.ended(), named_event(dict(type="message_delta", delta=ends(piece), usage=usage()))]
            events.append(named_event(dict(type="message_stop")))
        return events or [named_event(dict(type="ping"))]

    failed = lambda error: named_event(error.anthropic_body())  # noqa: E731
    return EventStream(answers, service, of_piece=of_piece, failed=failed, done=b"")


async def count_tokens(request: Request) -> Response:
    """Returns the number of tokens of a chat."""
    service: Service = request.app.state.service
    service.check_ready()
    fields = parsed(MessagesRequest, await read_body(request))
    service.check_model(fields.model)
    chat = _chat(fields)
    count = await service.in_thread(lambda: len(encode(service.tokenizer, chat_text(service, chat))))
    return json_response(dict(input_tokens=count))


class _Blocks:
    """The blocks of a streamed message: one for each run of thoughts or text."""

    def __init__(self) -> None:
        self._kind, self._number = None, -1

    def grown(self, kind: str, text: str) -> list[bytes]:
        """Returns the events of new text of a kind; none if it is empty."""
        if not text:
            return []
        events = []
        if self._kind != kind:
            events = self.ended()
            self._kind, self._number = kind, self._number + 1
            begun = dict(type="content_block_start", index=self._number, content_block=_block(kind, ""))
            events.append(named_event(begun))
        delta = {"type": f"{kind}_delta", kind: text}
        return [*events, named_event(dict(type="content_block_delta", index=self._number, delta=delta))]

    def ended(self) -> list[bytes]:
        """Returns the event that ends the present block; none if no block is open."""
        ends = [] if self._kind is None else [named_event(dict(type="content_block_stop", index=self._number))]
        self._kind = None
        return ends


def _block(kind: str, text: str) -> dict[str, str]:
    return {"type": kind, kind: text} | ({"signature": ""} if kind == "thinking" else {})


def _chat(fields: MessagesRequest) -> SimpleNamespace:
    """Returns the chat of a body; ApiError 400 for tools and other fields that are not built."""
    parameters.refuse_not_built(fields)
    if fields.tools and (fields.tool_choice or {}).get("type") != "none":
        message = "tools are not supported yet: leave them out, or give tool_choice {'type': 'none'}"
        raise ApiError(400, message, param="tools", code="unsupported_parameter")
    fields.stop = fields.stop_sequences or []
    system = [] if not fields.system else [{"role": "system", "content": fields.system}]
    chat = [_message(message) for message in fields.messages]
    return SimpleNamespace(messages=[*system, *chat], chat_template_kwargs=fields.chat_template_kwargs)


def _message(message: Message) -> Message:
    """Returns a message whose thoughts stand beside its text, as templates read them."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
    for kind in kinds:
        if kind in ("tool_use", "tool_result"):
            raise ApiError(400, f"a content has a part of type {quoted(kind)}: tools are not supported yet", param="messages")
    thoughts = [part.get("thinking") for part, kind in zip(content, kinds, strict=True) if kind == "thinking"]
    texts = [part for part, kind in zip(content, kinds, strict=True) if kind not in ("thinking", "redacted_thinking")]
    reasoning = {"reasoning": "".join(map(str, thoughts))} if thoughts else {}
    return message | {"content": texts or ""} | reasoning
