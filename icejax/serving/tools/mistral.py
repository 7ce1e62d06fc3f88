"""Mistral's forms: a list of objects after [TOOL_CALLS], or a name and arguments after each [TOOL_CALLS].

[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]
[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]weather[ARGS]{"city": "Rome"}
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from icejax.serving.tools.events import Event, Text
from icejax.serving.tools.form import Choice, Form, Parser, Tool, arguments_rule, call_rule, one_or_several
from icejax.serving.tools.json_values import SPACES, ArgumentsReader
from icejax.serving.tools.marked import MarkedParser
from icejax.text.grammar.rules import literal

OPENING, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAMED = re.compile(r"\s*([\w.:/-]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\]\s*|\s*(?=\{))")
LONGEST_NAME = 256
ID_LENGTH = 9  # of a call's id: templates refuse others


@dataclass(frozen=True, kw_only=True)
class Mistral(Form):
    """Attributes:
    named: whether calls are a name and arguments; False: a list of objects.
    """

    named: bool = False

    def _rules(self, tools: Sequence[Tool], choice: Choice) -> str:
        if self.named:
            between = self.mark(ARGUMENTS) if ARGUMENTS in self.tokens else '""'
            one = " | ".join(f"{literal(tool.name)} {between} arguments{i}" for i, tool in enumerate(tools))
            rules = [*self.marked(OPENING, choice, between='""'), f"call: opening ({one})"]
        else:
            one = " | ".join(call_rule(i, tool, "arguments") for i, tool in enumerate(tools))
            ones = one_or_several("one", '", "', choice)
            rules = self.marked(OPENING, replace(choice, parallel=False), between='""')
            rules += [f'call: opening " "? "[" {ones} "]"', f"one: {one}"]
        return "\n".join([*rules, *map(arguments_rule, range(len(tools)), tools)])

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return MistralParser(self.specials)

    def new_id(self) -> str:
        return secrets.token_hex(ID_LENGTH)[:ID_LENGTH]

    def known_id(self, given: str) -> str:
        is_own = len(given) == ID_LENGTH and given.isascii() and given.isalnum()
        return given if is_own else hashlib.sha256(given.encode(errors="replace")).hexdigest()[:ID_LENGTH]


class MistralParser(MarkedParser):
    """Reads both forms."""

    opening, marks = OPENING, (OPENING, ID, ARGUMENTS)
    _in_list = _has_name = False

    def _outside(self, events: list[Event]) -> bool:
        self._in_list = self._has_name = False
        return super()._outside(events)

    def _behind_mark(self, events: list[Event]) -> bool:
        if self._in_list or self._has_name:
            return self._read(events) if not self._reader.over else self._behind_call()
        text = self._held.lstrip(SPACES)
        if text.startswith("["):
            self._in_list = True
            self._raw, self._held = self._raw + "[", text[1:]
            return bool(self._held)
        if text and (found := NAMED.match(text)):
            self._has_name, self._reader = True, ArgumentsReader(self.calls, found[1])
            self._raw, self._held = self._raw + found[0], text[found.end() :]
            return bool(self._held)
        if len(text) > LONGEST_NAME or re.search(r"[^\w.:/\[\]-]", text.rstrip().partition("[")[0]):
            events.append(Text(self._raw + self._held))
            self._raw, self._held, self._inside = "", "", False
        return False

    def _behind_call(self) -> bool:
        """Continues after a call: to the next one of a list, or to text."""
        self._raw, self._held = "", self._held.lstrip(SPACES)
        if not self._held:
            return False
        if self._in_list and self._held[0] == ",":
            self._held, self._reader = self._held[1:], self._new_reader()
        else:
            self._held, self._inside = self._held.removeprefix("]") if self._in_list else self._held, False
        return bool(self._held)
