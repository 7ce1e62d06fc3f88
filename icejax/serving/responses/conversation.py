"""The messages of a chat from the items of a body of `/v1/responses`."""

from __future__ import annotations

import json
from typing import Any

from icejax.checks.errors import quoted
from icejax.serving.errors import ApiError
from icejax.serving.responses.asked import INPUT, chat_name
from icejax.text.chat_messages import Message

Item = dict[str, Any]
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
SYSTEM = ("system", "developer")
KINDS = "expected message, reasoning, or a call of a function or custom tool and its output"
CALLS = ("function_call", "custom_tool_call")
# What Codex has from tools of OpenAI's own server, and tools, which `asked` reads.
LEFT_OUT = (
    "additional_tools configuration_update image_generation_call tool_search_call tool_search_output web_search_call"
).split()
UNSEEN = "[an image, which this model cannot see]"


def conversation(instructions: str | None, items: str | list[Item]) -> list[Message]:
    """Returns the messages of a chat.

    Instructions and the system messages that follow them are one message, because most templates read only the first. A call of
    a function joins the answer before it, unless the model has thought in between; thoughts join the answer behind them.
    An image that a tool returns becomes a note, because the client cannot take it back.

    Raises:
        ApiError: 400 for an item or a part of another kind than text and calls of functions.
    """
    if isinstance(items, str):
        items = [dict(role="user", content=items)]
    messages: list[Message] = [] if not instructions else [dict(role="system", content=instructions)]
    thoughts: str | None = None
    for item in items:
        kind = item.get("type") or "message"
        if kind in LEFT_OUT:
            continue
        if kind == "reasoning":
            thoughts = _text(item.get("content") or item.get("summary") or "") or None
            continue
        new = _message(kind, item)
        if new["role"] == "assistant" and thoughts:
            new["reasoning"] = thoughts
        last = messages[-1] if messages else None
        if kind in CALLS and last and last["role"] == "assistant" and not thoughts:
            last["tool_calls"] = last.get("tool_calls", []) + new["tool_calls"]
        elif new["role"] == "system" and len(messages) == 1 and last["role"] == "system":
            last["content"] = f"{last['content']}\n\n{new['content']}"
        else:
            messages.append(new)
        thoughts = None
    return messages


def _message(kind: Any, item: Item) -> Message:
    """Returns the message of an item that is no reasoning."""
    match kind:
        case "message":
            role = item.get("role")
            return dict(role="system" if role in SYSTEM else role, content=_text(item.get("content")))
        case "agent_message":  # of another agent of Codex
            return dict(role="user", content=_text(item.get("content")))
        case "function_call" | "custom_tool_call":
            is_custom = kind == "custom_tool_call"
            arguments = json.dumps({INPUT: _field(item, "input")}) if is_custom else _field(item, "arguments")
            function = dict(name=chat_name(_field(item, "name"), item.get("namespace")), arguments=arguments)
            call = dict(id=_field(item, "call_id"), type="function", function=function)
            return dict(role="assistant", content="", tool_calls=[call])
        case "function_call_output" | "custom_tool_call_output":
            content = item.get("output")
            if isinstance(content, list):
                content = [dict(type="text", text=UNSEEN) if _is_image(part) else part for part in content]
            return dict(role="tool", tool_call_id=_field(item, "call_id"), content=_text(content))
        case _:
            raise ApiError(400, f"input has an item of type {quoted(kind)}: {KINDS}", param="input")


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _field(item: Item, name: str) -> str:
    if not isinstance(item.get(name), str):
        raise ApiError(400, f"input has a {item['type']} whose {name} is no text", param="input")
    return item[name]


def _text(content: Any) -> str:
    """Returns a content's text; texts of several parts are joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"a content in input must be text, or a list of text parts, got {quoted(content)}", param="input")
    return "\n".join(map(_part, content))


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if kind in (*TEXTS, "refusal") else None
    if not isinstance(text, str):
        message = f"input has a part of type {quoted(kind)}: expected text, the only type that is read"
        raise ApiError(400, message, param="input")
    return text
