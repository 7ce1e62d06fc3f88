"""Qwen3-Coder: parameters between marks, as text; JSON only where the tool's schema asks for another type.

<tool_call>
<function=weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from icejax.checks.errors import InputError
from icejax.serving.tools.events import CallArguments, CallBegin, CallEnd, Event
from icejax.serving.tools.form import Choice, Form, Parser, Tool
from icejax.serving.tools.hermes import CLOSING, OPENING, HermesParser
from icejax.serving.tools.json_values import SPACES
from icejax.serving.tools.marked import begun
from icejax.text.grammar.rules import json_rule, literal

FUNCTION, PARAMETER = re.compile(r"<function=([^>\s]+)>"), re.compile(r"<parameter=([^>]+)>")
VALUE_END, FUNCTION_END = "</parameter>", "</function>"
LONGEST_MARK = 256
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
LIMITS = ("pattern", "minLength", "maxLength", "format", "const")  # of texts, which the grammar does not follow
REFERENCE = re.compile(r"#/(\$defs|definitions)/(.+)")


class QwenCoder(Form):
    """Parameters come in the schema's order."""

    def _rules(self, tools: Sequence[Tool], choice: Choice) -> str:
        names = " | ".join(f"function{i}" for i in range(len(tools)))
        call = f'call: opening "\\n" ({names}) "\\n" {self.mark(CLOSING)}'
        rules = [rule for i, tool in enumerate(tools) for rule in _function_rules(i, tool)]
        return "\n".join([*self.marked(OPENING, choice, between='"\\n"'), call, *rules])

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return QwenCoderParser(self.specials, tools)


def _function_rules(number: int, tool: Tool) -> list[str]:
    """Returns the rules of a function; InputError if it is strict and has a schema of text with limits."""
    required, parts, rules = _list(tool.parameters.get("required")), [], []
    for i, (name, schema) in enumerate(_object(tool.parameters.get("properties")).items()):
        rule = f"value{number}_{i}"
        parts.append(f"({literal(f'<parameter={name}>' + chr(10))} {rule}){'' if name in required else '?'}")
        rules.append(_value_rule(rule, f"{name!r} of {tool.name}", _resolved(tool.parameters, schema), tool))
    opening, closing = literal(f"<function={tool.name}>\n"), literal(FUNCTION_END)
    return [f"function{number}: {' '.join([opening, *parts, closing])}", *rules]


def _value_rule(rule: str, name: str, schema: Any, tool: Tool) -> str:
    end = literal(f"\n{VALUE_END}\n")
    if types_of(tool.parameters, schema) == {"string"}:
        if texts := _list(schema.get("enum")):
            return f"{rule}: ({' | '.join(literal(text) for text in texts)}) {end}"
        if tool.strict and (limits := [limit for limit in LIMITS if limit in schema]):
            raise InputError(
                f"{name} has {limits[0]!r}, which no grammar of Qwen3-Coder's calls follows: leave it or strict out"
            )
        return f"{rule}[lazy]: /(?s:.*)\\n<\\/parameter>\\n/"
    whole = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters} | dict(schema)
    value = json_rule(
        name, whole, lenient=not tool.strict, whitespace_flexible=False, item_separator=", ?", key_separator=": ?"
    )
    return f"{rule}: json_{rule} {end}\njson_{rule}: {value}"


def _resolved(root: Mapping[str, Any], schema: Any) -> Mapping[str, Any]:
    """Returns a schema, or that to which it refers; what is no schema becomes an empty one."""
    found = REFERENCE.fullmatch(str(_object(schema).get("$ref")))
    return _object(_object(root.get(found[1])).get(found[2]) if found else schema)


def types_of(root: Mapping[str, Any], schema: Any) -> set[str]:
    """Returns the types that a schema allows, as far as it names them."""
    kinds, left, seen = set[str](), [schema], set[int]()
    while left:
        one = _resolved(root, left.pop())
        if id(one) in seen:  # schemas may refer to each other in a circle
            continue
        seen.add(id(one))
        named = one.get("type")
        kinds |= {kind for kind in (_list(named) or [named]) if isinstance(kind, str)}
        if named is None:
            kinds |= {TYPES[type(value)] for value in _list(one.get("enum"))}
        left += [*_list(one.get("anyOf")), *_list(one.get("oneOf"))]
    return kinds


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def json_of(text: str, kinds: set[str]) -> str:
    """Returns a parameter's text as JSON of one of some types; of none, what it is by itself. Other text becomes a string."""
    literals = {"true": "true", "false": "false", "none": "null", "null": "null"}
    plain = literals.get(text.strip().lower(), text.strip())
    try:
        value = json.loads(plain, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = TYPES[type(value)]
    fits = kind in kinds or (kind == "integer" and "number" in kinds) or "string" not in kinds
    return plain if fits else json.dumps(text, ensure_ascii=False)


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is Python's, and no JSON")


class QwenCoderParser(HermesParser):
    """Reads calls; texts come as they are written, other values when they are complete."""

    def __init__(self, specials: Mapping[int, str], tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool.parameters for tool in tools}
        super().__init__(specials)

    def _new_reader(self) -> FunctionReader:
        return FunctionReader(self.calls, self._tools)


class FunctionReader:
    """Reads one function after the opening mark.

    Attributes:
        over: whether it is complete.
        failed: whether it is no call; then no event has come of it.
        begun: whether the call has begun.
    """

    def __init__(self, index: int, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.over = self.failed = self.begun = False
        self._index, self._tools, self._parameters = index, tools, dict[str, Any]()
        self._held, self._count = "", 0
        self._kinds: set[str] | None = None  # of the open parameter
        self._is_first = True  # whether none of its text has come

    def take(self, text: str) -> tuple[list[Event], str]:
        """Returns the events of new text, and what stands after the function."""
        self._held += text
        events, pieces = list[Event](), list[str]()
        while not (self.over or self.failed) and self._step(events, pieces):
            pass
        if arguments := "".join(pieces):
            events.append(CallArguments(self._index, arguments))
        behind, self._held = (self._held, "") if self.over or self.failed else ("", self._held)
        return [*events, *([CallEnd(self._index)] if self.over else [])], behind

    def cut(self) -> list[Event]:
        """Returns the end of a call that the answer's end cuts; between two parameters the arguments are closed."""
        if not self.begun or self.over:
            return []
        return [*([CallArguments(self._index, "}")] if self._kinds is None else []), CallEnd(self._index)]

    def _step(self, events: list[Event], pieces: list[str]) -> bool:
        """Takes a mark, or text of a parameter; False: more text must come."""
        if self._kinds is not None:
            return self._value(pieces)
        self._held = self._held.lstrip(SPACES)
        if not self.begun:
            if found := FUNCTION.match(self._held):
                self.begun, self._parameters = True, self._tools.get(found[1], {})
                events.append(CallBegin(self._index, found[1]))
                pieces.append("{")
                self._held = self._held[found.end() :]
                return True
            self.failed = not _may_begin(self._held, "<function=")
            return False
        if found := PARAMETER.match(self._held):
            properties = _object(self._parameters.get("properties"))
            self._kinds = types_of(self._parameters, properties.get(found[1])) or {"string"}
            quote = '"' if self._kinds == {"string"} else ""
            pieces.append(f"{', ' if self._count else ''}{json.dumps(found[1], ensure_ascii=False)}: {quote}")
            self._count, self._is_first, self._held = self._count + 1, True, self._held[found.end() :]
            return True
        if self._held.startswith(FUNCTION_END) or not any(
            _may_begin(self._held, mark) for mark in ("<parameter=", FUNCTION_END)
        ):
            self._held, self.over = self._held.removeprefix(FUNCTION_END), True
            pieces.append("}")
        return False

    def _value(self, pieces: list[str]) -> bool:
        """Takes text of a parameter, without a line break at its beginning and at its end."""
        value, end, behind = self._held.partition(VALUE_END)
        if self._kinds != {"string"}:
            if end:
                pieces.append(json_of(value.removeprefix("\n").removesuffix("\n"), self._kinds))
                self._kinds, self._held = None, behind
            return bool(end)
        held = 0 if end else max(begun(value, mark) for mark in (VALUE_END, "\n" + VALUE_END))
        ready = value[: len(value) - held]
        self._held = behind if end else self._held[len(ready) :]
        text = ready.removesuffix("\n") if end else ready
        pieces.append(json.dumps(text.removeprefix("\n") if self._is_first else text, ensure_ascii=False)[1:-1])
        self._is_first = self._is_first and not ready
        if end:
            pieces.append('"')
            self._kinds = None
        return bool(end)


def _may_begin(text: str, mark: str) -> bool:
    """Whether a text is the beginning of a mark, or begins with it and is not too long for a name after it."""
    return mark.startswith(text) or (text.startswith(mark) and len(text) < LONGEST_MARK)
