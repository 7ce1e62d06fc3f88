"""Parsers of calls after a mark that is in the text, or is a special token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from icejax.serving.tools.events import Event, Text
from icejax.serving.tools.form import Parser
from icejax.serving.tools.json_values import ArgumentsReader, CallReader


class MarkedParser(Parser):
    """Reads text up to a mark, and what stands after it. Spaces before a mark are dropped; anything but a call is text.

    Attributes:
        opening: the mark.
        marks: special tokens that are read as if they were in the text.
    """

    opening: str
    marks: tuple[str, ...] = ()

    def __init__(self, specials: Mapping[int, str]) -> None:
        super().__init__(specials)
        self._held, self._inside = "", False
        self._raw, self._reader = "", self._new_reader()

    def take(self, text: str, special: str | None = None) -> list[Event]:
        self._held += text + (special if special in self.marks else "")
        events: list[Event] = []
        while self._held and (self._behind_mark(events) if self._inside else self._outside(events)):
            pass
        return events

    def rest(self) -> list[Event]:
        is_behind = self._inside and self._reader.over  # a call, where only marks come
        text = ("" if self._reader.begun else self._raw) + ("" if is_behind else self._held)
        self._raw = self._held = ""
        return [*self._reader.cut(), *([Text(text)] if text else [])]

    def _outside(self, events: list[Event]) -> bool:
        """Takes text before a mark; False: more text must come."""
        before, mark, behind = self._held.partition(self.opening)
        ready = before if mark else before[: len(before) - begun(before, self.opening)]
        ready = ready.rstrip()
        if ready:
            events.append(Text(ready))
        if mark:
            self._raw = before[len(ready) :] + mark  # what becomes text again if no call follows
            self._held, self._inside, self._reader = behind, True, self._new_reader()
        else:
            self._held = self._held[len(ready) :]
        return bool(mark)

    @abstractmethod
    def _behind_mark(self, events: list[Event]) -> bool:
        """Takes text after a mark; False: more text must come."""

    def _new_reader(self) -> ArgumentsReader | CallReader:
        return CallReader(self.calls)

    def _read(self, events: list[Event]) -> bool:
        """Gives the text to the reader; False: more text must come. What is no call becomes text again."""
        had_begun, text = self._reader.begun, self._held
        found, self._held = self._reader.take(text)
        events += found
        if not self._reader.begun:
            self._raw += text[: len(text) - len(self._held)]
        self.calls += self._reader.begun and not had_begun
        if self._reader.failed:
            events.append(Text(self._raw))
            self._raw, self._inside = "", False
        return self._reader.failed or self._reader.over


def begun(text: str, mark: str) -> int:
    """Returns how many characters at the end of a text may be the beginning of a mark."""
    return max(n for n in range(len(mark)) if text.endswith(mark[:n]))
