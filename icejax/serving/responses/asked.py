"""Tools and the form of the text in a body of `/v1/responses`, as chats have them."""

from __future__ import annotations

from typing import Any

from icejax.checks.errors import quoted
from icejax.serving.errors import ApiError

FIELDS = ("name", "description", "parameters", "strict")


def functions(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Returns the tools that are functions. Others, such as `web_search`, only OpenAI's own server can run."""
    return [tool for tool in tools or [] if tool.get("type") == "function"]


def chat_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns functions as chats have them, one level deeper."""
    return [dict(type="function", function={name: tool[name] for name in FIELDS if name in tool}) for tool in tools]


def chat_tool_choice(choice: Any) -> Any:
    """Returns a `tool_choice` as chats have it."""
    is_function = isinstance(choice, dict) and choice.get("type") == "function"
    return dict(type="function", function=dict(name=choice.get("name"))) if is_function else choice


def chat_format(form: dict[str, Any]) -> dict[str, Any]:
    """Returns a `text.format` as the `response_format` of a chat; ApiError 400 for one without a schema."""
    if form.get("type") != "json_schema":
        return form
    if not isinstance(form.get("schema"), dict):
        message = f"text.format of type json_schema needs a schema, which is an object, got {quoted(form.get('schema'))}"
        raise ApiError(400, message, param="text")
    return dict(type="json_schema", json_schema={name: form[name] for name in ("name", "schema", "strict") if name in form})
