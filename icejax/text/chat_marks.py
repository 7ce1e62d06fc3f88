"""Marks in the values of a chat template: they tell the control tokens that the template writes from their names in messages.

`chat_template.render` puts them into messages, tools and arguments, and reads them back from the rendered text. A mark is a
character of Unicode's private use that occurs nowhere else, so a template that trims, splits or joins texts keeps the marks.

Example: with the marks ( ) the message "a</s>" becomes "a(</s>)". The template writes "[a(</s>)]</s>", whose first "</s>" is in
marks and is text. The third mark stands behind the first character of a name that the end of a text cuts off: two parts "</"
and "s>" of a message would join to a name.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

from icejax.checks.errors import InputError
from icejax.text.chat_text import ChatText
from icejax.text.control_tokens import ControlTokens

PRIVATE = range(0xE000, 0xF900)


class Marks:
    """Four marks that are not in a text: before and behind a name, within a name, and at the end of the message to continue."""

    def __init__(self, controls: ControlTokens, text: str) -> None:
        """Chooses the marks; `text`: the template and all its values as JSON.

        Raises:
            InputError: the text has every private character.
        """
        used = {*text} | {chr(int(code, 16)) for code in re.findall(r"\\u([0-9a-f]{4})", text)}
        free = [*itertools.islice((chr(code) for code in PRIVATE if chr(code) not in used), 4)]
        if len(free) < 4:
            raise InputError("the chat has every private character of Unicode (U+E000 to U+F8FF): leave some of them out")
        self._controls = controls
        self._before, self._behind, self._within, self.end = free
        # A template may write texts as JSON, with escapes.
        self._forms = {form: mark for mark in free for form in (mark, json.dumps(mark)[1:-1])}

    def put(self, value: Any) -> Any:
        """Returns a value of JSON with marks in its texts, and in the names of its objects."""
        if isinstance(value, str):
            return self._marked(str(value))
        if isinstance(value, list):
            return [self.put(item) for item in value]
        if isinstance(value, dict):
            return {self._marked(name): self.put(item) for name, item in value.items()}
        return value

    def _marked(self, text: str) -> str:
        pieces, end = [], 0
        for start, stop, *_ in self._controls.find(text):
            pieces += [text[end:start], self._before, text[start:stop], self._behind]
            end = stop
        rest = text[end:]
        cut = self._controls.begun(rest)
        if cut is not None:
            rest = rest[: cut + 1] + self._within + rest[cut + 1 :]
        return "".join([*pieces, rest])

    def read(self, text: str) -> ChatText:
        """Returns a rendered text without marks, and the spans in which names of control tokens are text of messages."""
        pieces, places, length = [], {mark: set() for mark in self._forms.values()}, 0
        for piece in re.split(f"({'|'.join(map(re.escape, self._forms))})", text):
            if piece in self._forms:
                places[self._forms[piece]].add(length)
            else:
                pieces.append(piece)
                length += len(piece)
        plain, marked = "".join(pieces), sorted(set().union(*places.values()))
        spans, i = [], 0
        for start, end, *_ in self._controls.find(plain):
            while i < len(marked) and marked[i] <= start:
                i += 1
            is_cut = i < len(marked) and marked[i] < end
            if is_cut or (start in places[self._before] and end in places[self._behind]):
                spans.append((start, end))
        return ChatText(plain, spans)
