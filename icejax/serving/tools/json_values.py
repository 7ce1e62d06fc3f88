"""Reads calls that are JSON, character by character, so that the arguments come while the model writes them."""

from __future__ import annotations

import json

from icejax.serving.tools.events import CallArguments, CallBegin, CallEnd, Event

SPACES = " \t\r\n"


class Value:
    """The raw text of a JSON value as it grows. Brackets and quotes are counted; what stands between them is not checked.

    Attributes:
        over: whether the value is complete.
    """

    def __init__(self) -> None:
        self.over, self._depth, self._in_string, self._escaped, self._begun = False, 0, False, False, False

    def take(self, character: str) -> bool:
        """Returns whether a character belongs to the value; one that does not ends it."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string, self.over = False, self._depth == 0
        elif not self._depth and character in (SPACES if self._begun else "") + ",}]":
            self.over = True
            return False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.over = self._depth == 0
        self._begun = True
        return True


class ArgumentsReader:
    """Reads the arguments of a call whose name is known.

    Attributes:
        over: whether they are complete.
        failed: whether they are no arguments; then no event has come of them.
        begun: whether the call has begun.
    """

    def __init__(self, index: int, name: str) -> None:
        self.over, self.failed, self.begun = False, False, False
        self._index, self._name, self._value = index, name, Value()

    def take(self, text: str) -> tuple[list[Event], str]:
        """Returns the events of new text, and what stands after the arguments."""
        text = text if self.begun else text.lstrip(SPACES)
        if not text:
            return [], ""
        if not self.begun and text[0] != "{":
            self.failed = True
            return [], text
        events: list[Event] = [] if self.begun else [CallBegin(self._index, self._name)]
        self.begun, size = True, 0
        while size < len(text) and not self._value.over:
            self._value.take(text[size])
            size += 1
        self.over = self._value.over
        return [*events, CallArguments(self._index, text[:size]), *self.cut(if_over=True)], text[size:]

    def cut(self, *, if_over: bool = False) -> list[Event]:
        """Returns the end of a call whose arguments end here."""
        return [CallEnd(self._index)] if self.begun and self.over == if_over else []


class CallReader:
    """Reads one call, `{"name": NAME, "arguments": {...}}`, whose keys may come in any order.

    Arguments that are a JSON text of JSON, as some models write them, come without the outer quotes. An empty text is `{}`.

    Attributes:
        over: whether the object is complete.
        failed: whether it is no call; then no event has come of it.
        begun: whether the call has begun.
    """

    def __init__(self, index: int, *, arguments: tuple[str, ...] = ("arguments", "parameters"), others: bool = True) -> None:
        """Begins before the object.

        Args:
            index: number of the call.
            arguments: names of the key of the arguments.
            others: whether other keys, and a call without arguments, are allowed.
        """
        self.over = self.failed = False
        self._index, self._arguments, self._others = index, arguments, others
        self._expects, self._key, self._value, self._raw = "{", "", Value(), list[str]()
        self._name: str | None = None
        self._held = list[str]()  # arguments that came before the name
        self.begun = self._has_arguments = self._is_text = False

    def take(self, text: str) -> tuple[list[Event], str]:
        """Returns the events of new text, and what stands after the object."""
        events, piece = list[Event](), list[str]()
        for at, character in enumerate(text):
            if self.over or self.failed:
                return self._joined(events, piece), text[at:]
            self._step(character, events, piece)
        return self._joined(events, piece), ""

    def cut(self) -> list[Event]:
        """Returns the end of a call that the answer's end cuts."""
        return [CallEnd(self._index)] if self.begun and not self.over else []

    def _joined(self, events: list[Event], piece: list[str]) -> list[Event]:
        if piece:
            ends = events[-1:] if events and isinstance(events[-1], CallEnd) else []
            events[len(events) - len(ends) :] = [CallArguments(self._index, "".join(piece)), *ends]
            piece.clear()
        return events

    def _step(self, character: str, events: list[Event], piece: list[str]) -> None:
        match self._expects:
            case "value" if self._raw or character not in SPACES:
                belongs = self._value.take(character)
                if belongs:
                    self._raw.append(character)
                    if self._key in self._arguments:
                        self._argument(character, events, piece)
                if self._value.over:
                    self._ended(events, piece)
                if not belongs and not self.failed:
                    self._step(character, events, piece)
            case "key" if self._raw or character == '"':
                self._value.take(character)
                self._raw.append(character)
                if self._value.over:
                    self._key, self._expects = _loaded("".join(self._raw), ""), ":"
                    if not (self._others or self._key in ("name", "type", "id", *self._arguments)):
                        self._fail()
            case _ if character in SPACES:
                return
            case "{" if character == "{":
                self._expects, self._value, self._raw = "key", Value(), []
            case ":" if character == ":":
                self._expects, self._value, self._raw = "value", Value(), []
            case "," if character == ",":
                self._expects, self._value, self._raw = "key", Value(), []
            case "," | "key" if character == "}":
                self._close(events, piece)
            case _:
                self._fail(events)

    def _argument(self, character: str, events: list[Event], piece: list[str]) -> None:
        if len(self._raw) == 1:
            self._has_arguments, self._is_text = True, character == '"'
        if not self._is_text:
            self._write(character, events, piece)

    def _write(self, text: str, events: list[Event], piece: list[str]) -> None:
        if self._name is None:
            self._held.append(text)
            return
        if not self.begun:
            self.begun = True
            events.append(CallBegin(self._index, self._name))
        piece.append(text)

    def _ended(self, events: list[Event], piece: list[str]) -> None:
        """Takes a value that is complete."""
        raw, self._expects = "".join(self._raw), ","
        if self._key in self._arguments and self._is_text:
            self._write(_loaded(raw, raw) or "{}", events, piece)
        elif self._key == "name" and self._name is None:
            name = _loaded(raw, None)
            if not isinstance(name, str) or not name:
                self._fail(events)
                return
            self._name = name
            if self._held:
                self._write("".join(self._held), events, piece)

    def _close(self, events: list[Event], piece: list[str]) -> None:
        if self._name is None or not (self._others or self._has_arguments):
            self._fail(events)
            return
        if not self._has_arguments:
            self._write("{}", events, piece)
        self.over = True
        self._joined(events, piece)
        events.append(CallEnd(self._index))

    def _fail(self, events: list[Event] | None = None) -> None:
        if self.begun and events is not None:  # half of it is with the client already
            self.over = True
            events.append(CallEnd(self._index))
        else:
            self.failed = True


def _loaded(raw: str, default: object) -> object:
    try:
        return json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return default
