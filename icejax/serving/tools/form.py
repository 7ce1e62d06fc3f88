"""A form of tool calls, and the form that a model's tokenizer and chat template show.

form = form_of(tokenizer)                # None: the template has no tool calls of a known form
grammar = form.grammar(tools, choice)    # None: the model may write anything
parser = form.parser(tools)
for piece in handle: events = parser.read(piece)
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from icejax.engine.response import GenerationResponse
from icejax.serving.tools.events import CallArguments, Event, Text
from icejax.text.grammar.rules import Grammar, json_rule, literal

MOST_CALLS = 16  # of an answer that must call: without an end to them a small model may call for ever
CLOSE = dict(whitespace_flexible=False, item_separator=", ?", key_separator=": ?")  # JSON without line breaks


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments, an object.
        strict: whether arguments must follow the schema, so that a schema with parts that no grammar has is refused.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False

    def body(self) -> dict[str, Any]:
        """Returns the description that chat templates read, which is OpenAI's."""
        function = dict(name=self.name, description=self.description, parameters=dict(self.parameters))
        return dict(type="function", function=function)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Whether the model calls tools.

    Attributes:
        required: whether the answer must be a call.
        name: the function that must be called; None: any.
        parallel: whether an answer may have several calls.
    """

    required: bool = False
    name: str | None = None
    parallel: bool = True


class Parser(ABC):
    """Takes the calls out of one answer's pieces.

    Attributes:
        calls: number of calls that have begun.
    """

    def __init__(self, specials: Mapping[int, str]) -> None:
        """Begins before an answer; `specials`: names of special tokens, which are not in its text, by id."""
        self._specials, self.calls = specials, 0

    def read(self, piece: GenerationResponse) -> list[Event]:
        """Returns the events of a piece of one token; of an answer's last piece also those of its end."""
        events = self.take(piece.text, self._specials.get(piece.token_ids[-1]))
        return events if piece.finish_reason is None else [*events, *self.rest()]

    @abstractmethod
    def take(self, text: str, special: str | None = None) -> list[Event]:
        """Returns the events of new text, and of the special token after it."""

    @abstractmethod
    def rest(self) -> list[Event]:
        """Returns the events of what is held back, when no more text comes."""


@dataclass(frozen=True, kw_only=True)
class Form(ABC):
    """A way in which models write tool calls.

    Attributes:
        tokens: ids of the tokenizer's added tokens by name.
        specials: names of its special tokens by id, which are not in an answer's text.
        may_be_text: whether rules of calls that are not required can be made.
    """

    may_be_text: ClassVar[bool] = True
    tokens: Mapping[str, int]
    specials: Mapping[int, str]

    def grammar(self, tools: Sequence[Tool], choice: Choice) -> Grammar | None:
        """Returns the grammar of an answer that must call, or that may and has a strict tool; None: it may be anything.

        Raises:
            InputError: a schema cannot be enforced.
        """
        if choice.required:
            chosen = [tool for tool in tools if choice.name in (None, tool.name)]
            return Grammar(self._rules(chosen, choice), has_marks=True)
        has_rules = self.may_be_text and any(tool.strict for tool in tools)
        return Grammar(self._rules(tools, choice), has_marks=True) if has_rules else None

    @abstractmethod
    def _rules(self, tools: Sequence[Tool], choice: Choice) -> str:
        """Returns the rules of one call or, if allowed, of several; if none is required, of text around them too."""

    @abstractmethod
    def parser(self, tools: Sequence[Tool]) -> Parser:
        """Returns the parser of an answer that may call `tools`."""

    def new_id(self) -> str:
        """Returns the id of a new call."""
        return f"call_{secrets.token_hex(12)}"

    def known_id(self, given: str) -> str:
        """Returns the id of an earlier call as the chat template takes it."""
        return given

    def mark(self, name: str) -> str:
        """Returns a mark of the form in a grammar: its token, or its text if no token has this name."""
        return f"<[{self.tokens[name]}]>" if name in self.tokens else literal(name)

    def marked(self, mark: str, choice: Choice, *, between: str) -> list[str]:
        """Returns the rules `answer`, of calls that the rule `call` describes, and `opening`: `mark`, at which a call begins.

        If no call is required, text may stand before the mark and after the last call. It cannot spell the mark.

        Args:
            between: the part of a rule that matches what stands between two calls, if they are required.
        """
        if choice.required:
            return [f"answer: {one_or_several('call', between, choice)}", f"opening: {self.mark(mark)}"]
        spelled = f"/(?s:.*){re.escape(mark)}"
        opening = f"opening: TEXT {self.mark(mark)}" if mark in self.tokens else f"opening[lazy]: {spelled}/"
        answer = f"answer: call{{0,{MOST_CALLS if choice.parallel else 1}}} TEXT"
        return [answer, opening, f"TEXT: /(?s:.*)/ & ~{spelled}(?s:.*)/"]


def one_or_several(rule: str, between: str, choice: Choice) -> str:
    """Returns the part of a rule that matches what `rule` does or, if allowed, several of it with `between` between them."""
    return f"{rule} ({between} {rule}){{0,{MOST_CALLS - 1}}}" if choice.parallel else rule


def call_rule(number: int, tool: Tool, key: str) -> str:
    """Returns the part of a rule that matches a call as a JSON object; `key`: the name of the arguments' key."""
    return f'{literal(f"""{{"name": "{tool.name}", "{key}": """)} arguments{number} "}}"'


def arguments_rule(number: int, tool: Tool) -> str:
    """Returns the rule of a tool's arguments.

    Raises:
        InputError: the tool's parameters are no JSON schema.
    """
    schema = {"type": "object"} | dict(tool.parameters)
    schema = json_rule(f"the parameters of {tool.name}", schema, lenient=not tool.strict, **CLOSE)
    return f"arguments{number}: {schema}"


def joined(events: Sequence[Event]) -> list[Event]:
    """Returns events with neighbouring texts, and neighbouring arguments of a call, as one."""
    out: list[Event] = []
    for event in events:
        if out and type(out[-1]) is type(event) and isinstance(event, Text | CallArguments):
            out[-1] = out[-1]._replace(text=out[-1].text + event.text)
        else:
            out.append(event)
    return out
