"""The bodies of requests, as OpenAI's clients and vLLM's tools send them. Fields that nobody knows are left out.

Fields that ask for something which is not built are named here and refused if they are set: a client must not believe that they
had an effect. Ranges of the options of an answer are checked where the engine's options are made (`parameters`).
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from icejax.checks.errors import printable, quoted
from icejax.serving.errors import ApiError
from icejax.serving.json_text import json_object

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# A check ends at the first fault of a list or an object: a body may have a million of them.
Tokens = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
MOST_STOPS = 64  # stop strings of a request
Stops = Annotated[list[str], Field(max_length=MOST_STOPS, fail_fast=True)]
FORMS = {  # of the fields that have several
    "prompt": "must be text, token ids, or a list of either",
    "stop": f"must be text, or a list of at most {MOST_STOPS} texts",
    "tool_choice": "must be text or an object",
    "system": "must be text, or a list of text blocks",
    "input": "must be text, or a list of items",
}
Body = TypeVar("Body", bound="Schema")


class Schema(BaseModel):
    """A body. Numbers must be numbers: "3" is none."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class StreamOptions(Schema):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class AnswerFields(Schema):
    """The fields of all answers, under OpenAI's names; the last ones are vLLM's or llama.cpp's, and `explain` is ours."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    stop: str | Stops | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(fail_fast=True)] | None = None
    user: str | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    parse_special: bool | None = None
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    explain: bool | None = None
    # Not built:
    min_tokens: Any = None
    use_beam_search: Any = None
    prompt_logprobs: Any = None
    stop_token_ids: Any = None
    logits_processors: Any = None


class CompletionRequest(AnswerFields):
    """The body of `/v1/completions`: `prompt` is a text, several, token ids, or several lists of them."""

    prompt: str | Tokens | Texts | Annotated[list[Tokens], Field(fail_fast=True)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None


class ChatRequest(AnswerFields):
    """The body of `/v1/chat/completions`."""

    messages: Objects
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # Not built:
    functions: Any = None
    audio: Any = None
    modalities: Texts | None = None
    web_search_options: Any = None


class OutputConfig(Schema):
    """How much a model thinks, in `/v1/messages`, and the form of its text."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesRequest(AnswerFields):
    """The body of `/v1/messages`, as Anthropic has it."""

    messages: Objects
    system: str | Objects | None = None
    stop_sequences: Stops | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Thinking(Schema):
    """How a model thinks, in `/v1/responses`; `summary` asks for the thoughts in the place of a summary."""

    effort: str | None = None
    summary: str | None = None


class TextForm(Schema):
    """The form of a response's text; `format` is a `response_format` whose JSON schema stands beside its type."""

    format: dict[str, Any] | None = None


class ResponsesRequest(AnswerFields):
    """The body of `/v1/responses`: `input` is a text, or the items of a conversation."""

    input: str | Objects
    instructions: str | None = None
    max_output_tokens: Count | None = None
    reasoning: Thinking | None = None
    include: Texts | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: Annotated[dict[str, str], Field(fail_fast=True)] | None = None
    truncation: str | None = None
    text: TextForm | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Not built:
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None


class TokenizeRequest(Schema):
    """The body of `/tokenize`, as vLLM has it: a `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Schema):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: Tokens


def parsed(kind: type[Body], body: bytes) -> Body:
    """Returns a body; ApiError 400 if it is no JSON object of this kind, with the first field that is at fault."""
    try:
        return kind.model_validate(json_object(body))
    except ValidationError as error:
        raise _fault(error) from None
    except ValueError as error:  # also a whole number of more digits than Python reads
        raise ApiError(400, printable(str(error))) from None


def _fault(error: ValidationError) -> ApiError:
    """Returns the error for the first field that is at fault; of several readings of a field the first one's."""
    fault = error.errors(include_url=False, include_context=False)[0]
    name = str(fault["loc"][0]) if fault["loc"] else "body"
    if fault["type"] == "missing":
        return ApiError(400, f"{name!r} is missing: expected it in the body", param=name, code="missing_field")
    if name in FORMS:
        return ApiError(400, f"{name} {FORMS[name]}", param=name)
    place = "".join(f"[{part}]" for part in fault["loc"][1:] if isinstance(part, int))
    expected = fault["msg"].removeprefix("Input ").replace("Value error, ", "")
    return ApiError(400, printable(f"{name}{place}: {expected}, got {quoted(fault['input'])}")[:500], param=name)
