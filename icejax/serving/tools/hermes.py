"""Hermes, which Qwen and many fine-tunes write: JSON objects between marks.

<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence

from icejax.serving.tools.events import Event
from icejax.serving.tools.form import Choice, Form, Parser, Tool, arguments_rule, call_rule
from icejax.serving.tools.json_values import SPACES
from icejax.serving.tools.marked import MarkedParser

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Hermes(Form):
    """Several calls follow one another."""

    def _rules(self, tools: Sequence[Tool], choice: Choice) -> str:
        calls = " | ".join(call_rule(i, tool, "arguments") for i, tool in enumerate(tools))
        call = f'call: opening "\\n" ({calls}) "\\n" {self.mark(CLOSING)}'
        arguments = map(arguments_rule, range(len(tools)), tools)
        return "\n".join([*self.marked(OPENING, choice, between='"\\n"'), call, *arguments])

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return HermesParser(self.specials)


class HermesParser(MarkedParser):
    """Reads hermes; a closing mark that is missing is not missed."""

    opening, marks = OPENING, (OPENING, CLOSING)

    def _behind_mark(self, events: list[Event]) -> bool:
        if not self._reader.over:
            return self._read(events)
        self._held = self._held.lstrip(SPACES)
        if self._held.startswith(CLOSING) or not CLOSING.startswith(self._held):
            self._held, self._inside, self._raw = self._held.removeprefix(CLOSING), False, ""
            return True
        return False
