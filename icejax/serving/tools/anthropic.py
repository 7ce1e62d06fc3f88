"""Anthropic's messages, tools and choices as OpenAI has them, which chat templates read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from icejax.checks.errors import quoted
from icejax.serving import parameters
from icejax.serving.errors import ApiError
from icejax.serving.grammars import chat_format
from icejax.serving.schemas import MessagesRequest
from icejax.text.chat_messages import Message

APART = ("thinking", "redacted_thinking", "tool_use", "tool_result")  # parts of a content that are no text
BILLING = "x-anthropic-billing-header:"  # Claude Code's first system text; its later words may change with every request
UNSEEN = "[a part of type {}, which this model cannot read]"


def chat_of(fields: MessagesRequest) -> SimpleNamespace:
    """Returns the chat of a body, with OpenAI's messages and tools; ApiError 400 for fields that are not built."""
    parameters.refuse_not_built(fields)
    fields.stop = fields.stop_sequences or []
    form = fields.output_config and fields.output_config.format
    fields.response_format = chat_format(form, field="output_config") if form else None
    system = fields.system
    if isinstance(system, list):
        system = [part for part in system if not str(part.get("text")).startswith(BILLING)]
    first = [{"role": "system", "content": system}] if system else []
    chat = [one for message in fields.messages for one in _messages(message)]
    tools = [_tool(tool) for tool in fields.tools or []]
    return SimpleNamespace(
        messages=[*first, *chat],
        tools=tools or None,
        chat_template_kwargs=fields.chat_template_kwargs,
        reasoning_effort=_effort(fields),
    )


def _effort(fields: MessagesRequest) -> str | None:
    """Returns OpenAI's `reasoning_effort`."""
    if (fields.thinking or {}).get("type") == "disabled":
        return "none"
    return fields.output_config and fields.output_config.effort


def tool_choice(choice: dict[str, Any] | None) -> tuple[Any, bool]:
    """Returns OpenAI's `tool_choice`, and whether an answer may have several calls."""
    if choice is None:
        return None, True
    kinds = {"auto": "auto", "any": "required", "none": "none"}
    kinds["tool"] = {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") not in (*kinds,):
        raise ApiError(400, f"tool_choice must be of type auto, any, tool or none, got {quoted(choice)}", param="tool_choice")
    return kinds[choice["type"]], choice.get("disable_parallel_tool_use") is not True


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        message = f"a tool of type {quoted(tool['type'])} is not supported: expected one with a name and an input_schema"
        raise ApiError(400, message, param="tools", code="unsupported_parameter")
    function = dict(name=tool.get("name"), description=tool.get("description") or "", parameters=tool.get("input_schema"))
    return dict(type="function", function=function | ({"strict": True} if tool.get("strict") is True else {}))


def _messages(message: Message) -> list[Message]:
    """Returns a message as OpenAI has it: thoughts and calls stand beside the text, results are messages before it."""
    content = message.get("content")
    if not isinstance(content, list):
        return [message]
    of_kind: dict[str, list[Any]] = {}
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        of_kind.setdefault(kind if kind in APART else "text", []).append(part)
    results = [_result(part) for part in of_kind.get("tool_result", ())]
    texts, thoughts, calls = (of_kind.get(kind, []) for kind in ("text", "thinking", "tool_use"))
    if results and not texts:
        return results
    beside = {"reasoning": "".join(str(part.get("thinking")) for part in thoughts)} if thoughts else {}
    beside |= {"tool_calls": [_call(part) for part in calls]} if calls else {}
    return [*results, message | {"content": texts or (None if calls else "")} | beside]


def _result(part: dict[str, Any]) -> Message:
    """Returns a tool's result. An image in it becomes a note, because the client cannot take it back."""
    content = part.get("content")
    if isinstance(content, list):
        content = [_seen(one) for one in content]
    return {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": "" if content in (None, []) else content}


def _seen(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else "text"
    return part if kind == "text" or not isinstance(kind, str) else dict(type="text", text=UNSEEN.format(kind))


def _call(part: dict[str, Any]) -> dict[str, Any]:
    return dict(id=part.get("id"), type="function", function=dict(name=part.get("name"), arguments=part.get("input") or {}))
