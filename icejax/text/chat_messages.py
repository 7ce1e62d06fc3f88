"""Checks of messages, tools and template arguments from a user, before a chat template reads them.

`api.prompts`, `Session` and the commands call it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from icejax.checks.errors import InputError, quoted, suggestion

Message = dict[str, Any]
EXPECTED = "a list of objects with a text role, a content (text, or a list of text parts) and perhaps a text reasoning"
KEYS = ("role", "content", "reasoning", "reasoning_content", "name", "tool_calls", "tool_call_id")
RESERVED = ("messages", "tools", "add_generation_prompt")
FUNCTIONS = ("range", "dict", "lipsum", "cycler", "joiner", "namespace", "raise_exception", "strftime_now")
DEEPEST = 50  # levels of nesting


def checked_messages(name: str, value: Any) -> list[Message]:
    """Returns messages from a user as the chat template gets them; `reasoning_content` becomes `reasoning`.

    A message with `tool_calls` needs no content; keys whose value is null are left out, but for the content.

    Raises:
        InputError: it is no list of messages, or a part of a content is no text; the error begins with `name`.
    """
    items = json_value(name, value)
    if not (isinstance(items, list) and items and all(isinstance(item, dict) for item in items)):
        raise InputError(f"{name} must be {EXPECTED}, got {quoted(value)}")
    return [_message(name, item) for item in items]


def _message(name: str, item: Message) -> Message:
    message = {key: value for key, value in item.items() if value is not None or key == "content"}
    for key in message:
        if key not in KEYS:
            raise InputError(f"{name}: a message has no {quoted(key)}: expected {', '.join(KEYS)}{suggestion(key, KEYS)}")
    calls, content = message.get("tool_calls"), message.get("content")
    texts = [message[key] for key in message.keys() & {*KEYS} - {"content", "tool_calls"}]
    for part in content if isinstance(content, list) else []:
        _check_part(name, part)
    has_content = isinstance(content, str) or (isinstance(content, list) and bool(content)) or (content is None and bool(calls))
    thoughts = message.keys() & {"reasoning", "reasoning_content"}
    if not ("role" in message and has_content and len(thoughts) < 2 and all(isinstance(text, str) for text in texts)):
        raise InputError(f"{name} must be {EXPECTED}, got {quoted([item])}")
    if calls is not None:
        _check_objects(f"{name}: 'tool_calls'", calls)
    return {"reasoning" if key == "reasoning_content" else key: value for key, value in message.items()}


def _check_part(name: str, part: Any) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise InputError(f"{name}: a content has a part of type {quoted(kind)}: expected text, the only type that is read")
    if kind is None or not isinstance(part.get("text"), str):
        raise InputError(f"{name}: a part of a content must be an object with the type 'text' and a text, got {quoted(part)}")


def _check_objects(name: str, value: Any) -> None:
    if not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        raise InputError(f"{name} must be a list of objects, got {quoted(value)}")


def template_variables(tools: Any = None, arguments: Any = None) -> dict[str, Any]:
    """Returns the variables of a chat template besides the messages.

    Args:
        tools: descriptions of functions, as JSON objects; None: none.
        arguments: the template's own variables by name (`chat_template_kwargs`), such as `enable_thinking`; None: none.

    Raises:
        InputError: they are no values of JSON, or an argument has the name of a variable that icejax sets, or of a function.
    """
    variables = json_value("chat_template_kwargs", {} if arguments is None else arguments)
    if not isinstance(variables, dict):
        raise InputError(f"chat_template_kwargs must be an object of names and values, got {quoted(arguments)}")
    for name in variables:
        reason = "" if name.isidentifier() else "expected letters, digits and underscores"
        if name in RESERVED or name in FUNCTIONS:
            reason = "icejax sets it" if name in RESERVED else "templates call the function of this name"
        if reason:
            raise InputError(f"{quoted(name)} cannot be an argument of a chat template: {reason}")
    if tools is not None:
        tools = json_value("tools", tools)
        _check_objects("tools", tools)
    return variables | ({"tools": tools} if tools else {})


def json_value(name: str, value: Any, *, depth: int = 0) -> Any:
    """Returns a value of JSON with lists for tuples and dicts for mappings; InputError for anything else, or deep nesting."""
    if depth > DEEPEST:
        raise InputError(f"{name} is nested more than {DEEPEST} levels deep")
    if isinstance(value, str):
        return str(value)
    is_number = math.isfinite(value) if isinstance(value, float) else isinstance(value, int) and abs(value) < 2**63
    if value is None or isinstance(value, bool) or is_number:
        return value
    if isinstance(value, (list, tuple)):
        return [json_value(name, item, depth=depth + 1) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: json_value(name, item, depth=depth + 1) for key, item in value.items()}
    raise InputError(f"{name} must be made of text, numbers, lists and objects, got {quoted(value)}")
