"""The tools of a request: its functions, whether the model must call them, and the calls of earlier messages.

Functions and messages are OpenAI's; `routes.messages` makes these of Anthropic's.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from icejax.checks.errors import quoted
from icejax.serving.errors import ApiError
from icejax.serving.tools.form import Choice, Form, Tool
from icejax.serving.tools.forms import form_of
from icejax.text.grammar.rules import Grammar

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
MOST_TOOLS = 512


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Tools that the model may call.

    Attributes:
        form: the form in which the model writes calls.
    """

    form: Form
    tools: tuple[Tool, ...]
    choice: Choice

    def grammar(self) -> Grammar | None:
        """Returns the grammar of an answer, as `Form.grammar` does."""
        return self.form.grammar(self.tools, self.choice)


def asked_tools(tokenizer: Any, tools: list[Any] | None, choice: Any, *, parallel: bool | None) -> Asked | None:
    """Returns the tools of a request; None: the model must call none.

    Args:
        tools: OpenAI's objects of type function.
        choice: OpenAI's `tool_choice`; None: auto.
        parallel: whether an answer may have several calls; None: it may.

    Raises:
        ApiError: 400 for something else, or a model whose form of calls is not known.
    """
    functions = tuple(_tool(i, tool) for i, tool in enumerate(tools or []))
    if len({tool.name for tool in functions}) < len(functions) or len(functions) > MOST_TOOLS:
        raise ApiError(400, f"tools must have different names, and be at most {MOST_TOOLS}", param="tools")
    required, name = _choice(choice)
    if not functions:
        if required:
            raise ApiError(400, "tool_choice needs tools, and the request has none", param="tool_choice")
        return None
    if choice == "none":
        return None
    if name is not None and name not in {tool.name for tool in functions}:
        raise ApiError(400, f"tool_choice names {quoted(name)}, which is none of the tools", param="tool_choice")
    form = form_of(tokenizer)
    if form is None:
        known = "hermes, Qwen3-Coder, Mistral, Llama 3, harmony"
        message = f"the chat template has no tool calls of a known form ({known}): leave tools out"
        raise ApiError(400, message, param="tools", code="unsupported_parameter")
    chosen = Choice(required=required, name=name, parallel=parallel is not False)
    return Asked(form=form, tools=functions, choice=chosen)


def _tool(number: int, tool: Any) -> Tool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise ApiError(400, f"tools[{number}] must be an object of type 'function' with a function", param="tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        message = f"tools[{number}]: the name must be 1 to 128 letters, digits, '_', '-' and '.', got {quoted(name)}"
        raise ApiError(400, message, param="tools")
    description = function.get("description") or ""
    if not isinstance(parameters, dict | None) or not isinstance(description, str):
        raise ApiError(400, f"tools[{number}]: parameters must be an object, and the description text", param="tools")
    schema = dict(parameters=parameters) if parameters else {}
    return Tool(name=name, description=description, strict=function.get("strict") is True, **schema)


def _choice(choice: Any) -> tuple[bool, str | None]:
    """Returns whether a call is required, and the function's name if one is named."""
    if choice in (None, "auto", "none"):
        return False, None
    if choice == "required":
        return True, None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        message = f"tool_choice must be none, auto, required, or an object of type 'function' with a name, got {quoted(choice)}"
        raise ApiError(400, message, param="tool_choice")
    return True, function["name"]


def with_calls(message: dict[str, Any], form: Form | None) -> dict[str, Any]:
    """Returns a message of a chat with calls as chat templates read them: arguments are objects, and ids the form's own."""
    known = (lambda given: given) if form is None else form.known_id
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message = message | {"tool_calls": [_call(call, known) if isinstance(call, dict) else call for call in calls]}
    if isinstance(message.get("tool_call_id"), str):
        message = message | {"tool_call_id": known(message["tool_call_id"])}
    return message


def _call(call: dict[str, Any], known: Any) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        function = function | {"arguments": arguments_object(function["arguments"])}
    own_id = {"id": known(call["id"])} if isinstance(call.get("id"), str) else {}
    return call | {"function": function} | own_id


def arguments_object(text: str) -> Any:
    """Returns a call's arguments as a JSON object; text that is none stays text, and no text is none."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
