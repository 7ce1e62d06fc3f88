"""The tools in a body of `/v1/responses`, as chats have them.

A chat has functions alone. One of a namespace, in which Codex sends the tools of MCP servers, is `NAMESPACE__NAME` there. A
custom tool, whose input is a text, is a function with this text as its argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from icejax.serving.tools.asked import arguments_object

FIELDS = ("description", "parameters", "strict")
BARE = "functions"  # the namespace that adds nothing to names
INPUT = "input"
Object = dict[str, Any]


@dataclass(frozen=True)
class ResponsesTool:
    """A tool of a body that a chat can have.

    Attributes:
        tool: the body's own object, of type function or custom.
        namespace: the namespace that it stands in; None: in none, or in that of bare names.
    """

    tool: Object
    namespace: str | None = None

    @property
    def is_custom(self) -> bool:
        """Whether its input is a text."""
        return self.tool["type"] == "custom"

    @property
    def chat_name(self) -> Any:
        """The function's name in a chat."""
        return chat_name(self.tool.get("name"), self.namespace)

    def named(self) -> Object:
        """Returns the fields of a call's item that name the tool."""
        return dict(name=self.tool["name"]) | ({} if self.namespace is None else dict(namespace=self.namespace))

    def chat_tool(self) -> Object:
        """Returns the function as chats have it."""
        function = {name: self.tool[name] for name in FIELDS if name in self.tool}
        if self.is_custom:
            text = dict(type="string") | _described(self.tool.get("format"))
            schema = dict(type="object", properties={INPUT: text}, required=[INPUT], additionalProperties=False)
            function = dict(description=self.tool.get("description") or "", parameters=schema)
        return dict(type="function", function=dict(name=self.chat_name) | function)


def chat_name(name: Any, namespace: Any = None) -> Any:
    """Returns a tool's name in a chat."""
    return f"{namespace}__{name}" if isinstance(name, str) and namespace not in (None, BARE) else name


def custom_input(arguments: str) -> str:
    """Returns the text that a call of a custom tool brings; of arguments that were cut or are no such object, all."""
    value = arguments_object(arguments)
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def asked_for(tools: list[Object] | None, items: str | list[Object]) -> list[ResponsesTool]:
    """Returns the tools of a body that a chat can have; others, such as `web_search`, only OpenAI's own server can run.

    Items of type `additional_tools` bring more, which take the place of earlier ones with their names.
    """
    found = _flat(tools)
    for item in items if isinstance(items, list) else ():
        if item.get("type") == "additional_tools":
            new = _flat(item.get("tools"))
            names = [one.chat_name for one in new]  # a name may be anything yet
            found = [one for one in found if one.chat_name not in names] + new
    return found


def _flat(tools: Any, namespace: str | None = None) -> list[ResponsesTool]:
    found: list[ResponsesTool] = []
    for tool in tools if isinstance(tools, list) else ():
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace" and namespace is None:
            found += _flat(tool.get("tools"), str(tool.get("name")))
        elif kind in ("function", "custom"):
            found.append(ResponsesTool(tool, None if namespace == BARE else namespace))
    return found


def _described(form: Any) -> dict[str, str]:
    """Returns the description of a custom tool's text; none if it may be anything."""
    if not (isinstance(form, dict) and form.get("type") == "grammar"):
        return {}
    return dict(description=f"A text that this grammar ({form.get('syntax')}) matches:\n{form.get('definition')}")


def chat_tool_choice(choice: Any) -> Any:
    """Returns a `tool_choice` as chats have it."""
    if not (isinstance(choice, dict) and choice.get("type") in ("function", "custom")):
        return choice
    return dict(type="function", function=dict(name=chat_name(choice.get("name"), choice.get("namespace"))))
