"""`/v1/responses`: a conversation as items, and the model's answer. https://platform.openai.com/docs/api-reference/responses

The server stores nothing: each request brings the whole conversation. Thoughts are an item of type `reasoning`: its text, or
its summary if the request asks for one. Nothing is summarised.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from icejax.engine.request import Request as EngineRequest
from icejax.engine.response import GenerationResponse
from icejax.serving import parameters
from icejax.serving.errors import ApiError
from icejax.serving.grammars import chat_format
from icejax.serving.guard import owner_of, read_body
from icejax.serving.parameters import checked
from icejax.serving.responses.asked import asked_for, chat_tool_choice
from icejax.serving.responses.conversation import conversation
from icejax.serving.responses.output import SUMMARY, THOUGHTS, Output
from icejax.serving.routes.chat import NO_LIMIT, answer_grammar, chat_text, logprob
from icejax.serving.routes.turns import turns
from icejax.serving.schemas import ResponsesRequest, parsed
from icejax.serving.service import Service
from icejax.serving.streaming import EventStream, whole_response
from icejax.serving.tools.asked import asked_tools
from icejax.serving.tools.calls import CallsOf
from icejax.text.chat_messages import json_value

RUNNABLE = ("function", "custom", "namespace")  # types of tools that a client runs
LOGPROBS = "message.output_text.logprobs"
WHOLE = "the server stores no responses: send the whole conversation as 'input', with the output items of earlier responses"
REFUSED = {  # fields that ask for what the server does not do, with what to do instead
    "previous_response_id": WHOLE,
    "conversation": WHOLE,
    "background": "the server stores no responses: leave it out, and set 'stream' for a long answer",
    "prompt": "the server stores no prompts: send 'instructions' and 'input'",
    "max_tokens": "its name in this API is max_output_tokens",
    "response_format": "its name in this API is text.format",
}


async def responses(request: Request) -> Response:
    """Answers a conversation."""
    service: Service = request.app.state.service
    service.check_ready()
    fields = parsed(ResponsesRequest, await read_body(request))
    name = service.check_model(fields.model)
    _refuse(fields)
    known = asked_for(fields.tools, fields.input)
    tools = [tool.chat_tool() for tool in known]
    choice, parallel = chat_tool_choice(fields.tool_choice), fields.parallel_tool_calls
    callable_tools = asked_tools(service.tokenizer, tools, choice, parallel=parallel)
    fields.response_format = chat_format(fields.text.format, field="text") if fields.text and fields.text.format else None
    grammar = answer_grammar(fields, callable_tools)
    thinking = fields.reasoning or SimpleNamespace(effort=None, summary=None)
    sampling = parameters.sampling_of(fields, service.sampling, service.model.config.eos_token_ids)
    limit = service.limit(fields, fields.max_output_tokens, default=NO_LIMIT)
    options = parameters.answer_options(fields, sampling=sampling, limit=limit)
    options |= dict(cache_salt=parameters.salt_of(fields, owner_of(request)), parse_special=service.parse_special)
    if LOGPROBS in (fields.include or ()):
        options["logprobs"] = fields.top_logprobs or 0
    chat = SimpleNamespace(
        messages=conversation(fields.instructions, fields.input),
        chat_template_kwargs=fields.chat_template_kwargs,
        reasoning_effort=thinking.effort,
        tools=tools,
    )

    def make() -> list[tuple[EngineRequest, dict[str, Any]]]:
        chat.messages = turns(service.tokenizer, chat.messages)
        return [(EngineRequest(prompt=chat_text(service, chat), grammar=grammar), options)]

    # What the response repeats is written again and again: JSON that can be read may be too deep to be written.
    about = checked("text", lambda: json_value("the request", _about(fields)))
    about |= dict(model=name, temperature=sampling.temperature, top_p=sampling.top_p)
    answers, calls = await service.submit(make, prompts=1, n=1), CallsOf(callable_tools)
    by_name = {tool.chat_name: tool for tool in known}
    output = Output(about, answers.usage, thoughts=SUMMARY if thinking.summary else THOUGHTS, tools=by_name)

    def of_piece(_: int, piece: GenerationResponse) -> list[bytes]:
        return output.take(piece, calls.read(piece), [logprob(token) for token in piece.logprobs or ()])

    if fields.stream:
        events = dict(first=output.begun(), of_piece=of_piece, failed=output.failed, waits=output.waits)
        return EventStream(answers, service, **events, done=b"")
    return await whole_response(request, answers, service, lambda _: output.response, read=of_piece)


def _refuse(fields: ResponsesRequest) -> None:
    """Raises ApiError 400 for a field that asks for more than is built."""
    parameters.refuse_not_built(fields)
    for name, instead in REFUSED.items():
        if getattr(fields, name):
            raise ApiError(400, f"{name} is not supported: {instead}", param=name, code="unsupported_parameter")
    if (fields.n or 1) != 1:
        raise ApiError(400, "n must be 1: a response has one answer", param="n")
    if fields.truncation not in (None, "disabled"):
        message = "truncation must be 'disabled': the server cuts no conversation"
        raise ApiError(400, message, param="truncation", code="unsupported_parameter")


def _about(fields: ResponsesRequest) -> dict[str, Any]:
    """Returns the fields of a response that repeat the request's."""
    reasoning = dict(effort=None, summary=None) | (fields.reasoning.model_dump() if fields.reasoning else {})
    return dict(
        instructions=fields.instructions,
        max_output_tokens=fields.max_output_tokens,
        metadata=fields.metadata or {},
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        previous_response_id=None,
        background=False,
        reasoning=reasoning,
        store=False,
        text=dict(format=(fields.text and fields.text.format) or dict(type="text")),
        tool_choice=fields.tool_choice or "auto",
        tools=[tool for tool in fields.tools or [] if tool.get("type") in RUNNABLE],
        top_logprobs=fields.top_logprobs or 0,
        truncation="disabled",
        user=fields.user,
    )
