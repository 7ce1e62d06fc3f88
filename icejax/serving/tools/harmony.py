"""Harmony (gpt-oss): a call is a message of the channel `commentary` to a function.

    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>

`text.reasoning` reads the messages' headers, and writes the recipient before the text of such a message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from icejax.serving.tools.events import CallArguments, CallBegin, CallEnd, Event, Text
from icejax.serving.tools.form import Choice, Form, Parser, Tool, arguments_rule
from icejax.text.grammar.rules import literal
from icejax.text.reasoning import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START

RECIPIENT = re.compile(r"\s*to=functions\.(\S+) \Z")


class Harmony(Form):
    """An answer has one call: its end is the answer's. An answer that need not call has no rules: its headers are free."""

    may_be_text = False

    def _rules(self, tools: Sequence[Tool], choice: Choice) -> str:
        channel, constrain, message = map(self.mark, (CHANNEL, CONSTRAIN, MESSAGE))
        calls = [
            f'{channel} {literal(f"commentary to=functions.{tool.name} ")} {constrain} "json" {message} arguments{i}'
            for i, tool in enumerate(tools)
        ]
        return "\n".join([f"answer: {' | '.join(calls)}", *map(arguments_rule, range(len(tools)), tools)])

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return HarmonyParser(self.specials)


class HarmonyParser(Parser):
    """Reads the answer's text, in which a recipient is a call if it comes with the mark <|message|>."""

    def __init__(self, specials: Mapping[int, str]) -> None:
        super().__init__(specials)
        self._open = False

    def take(self, text: str, special: str | None = None) -> list[Event]:
        if special == MESSAGE and (found := RECIPIENT.search(text)):
            before = [Text(text[: found.start()])] if text[: found.start()] else []
            events = [*self._end(), *before, CallBegin(self.calls, found[1])]
            self._open, self.calls = True, self.calls + 1
            return events
        events: list[Event] = []
        if text:
            events.append(CallArguments(self.calls - 1, text) if self._open else Text(text))
        return [*events, *self._end()] if special in (*ENDS, START) else events

    def rest(self) -> list[Event]:
        return self._end()

    def _end(self) -> list[Event]:
        ended, self._open = [CallEnd(self.calls - 1)] if self._open else [], False
        return ended
