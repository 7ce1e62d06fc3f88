"""Llama 3's JSON: an answer that is one object or several, perhaps after <|python_tag|>.

{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "weather", "parameters": {"city": "Rome"}}
"""

from __future__ import annotations

from collections.abc import Sequence

from icejax.serving.tools.events import Event, Text
from icejax.serving.tools.form import Choice, Form, Parser, Tool, arguments_rule, call_rule, one_or_several
from icejax.serving.tools.json_values import SPACES, CallReader
from icejax.serving.tools.marked import MarkedParser

PYTHON = "<|python_tag|>"
SEPARATOR = '"; "'
NO_OBJECT = r"\s*([^\s{](?s:.*))?"  # text that cannot be read as a call


class Llama(Form):
    """An object with other keys than those of a call is text."""

    def _rules(self, tools: Sequence[Tool], choice: Choice) -> str:
        calls = " | ".join(call_rule(i, tool, "parameters") for i, tool in enumerate(tools))
        text = "" if choice.required else f" | /{NO_OBJECT}/"
        answer = f"answer: {one_or_several('call', SEPARATOR, choice)}{text}"
        return "\n".join([answer, f"call: {calls}", *map(arguments_rule, range(len(tools)), tools)])

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return LlamaParser(self.specials)


class LlamaParser(MarkedParser):
    """Reads calls at the beginning of an answer."""

    opening, marks = PYTHON, (PYTHON,)
    _is_text = False

    def _new_reader(self) -> CallReader:
        return CallReader(self.calls, arguments=("parameters", "arguments"), others=False)

    def _outside(self, events: list[Event]) -> bool:
        if self._is_text:
            events.append(Text(self._held))
            self._held = ""
            return False
        start = self._held.lstrip(SPACES).removeprefix(PYTHON)
        if not start or PYTHON.startswith(start):
            return False
        if start.startswith("{"):
            self._held, self._raw = start, ""
            self._inside, self._reader = True, self._new_reader()
        else:
            self._is_text, self._held = True, self._held if not self.calls else start
        return True

    def _behind_mark(self, events: list[Event]) -> bool:
        if not self._reader.over:
            ended = self._read(events)
            self._is_text = self._reader.failed
            return ended
        self._held = self._held.lstrip(SPACES + ";,")
        self._inside, self._raw = False, ""
        return bool(self._held)
