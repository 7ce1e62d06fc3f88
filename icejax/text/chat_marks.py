"""Marks around names of control tokens: they tell the names that a chat template writes from the names in messages.

`chat_origin` puts them into messages and the template, and reads them back from the rendered text. A mark is a character of
Unicode's private use that occurs nowhere else, so a template that trims, splits or joins texts keeps the marks.

Example: with the marks ( ) for messages and { } for all names, the message "a</s>" becomes "a({</s>})", and the template's own
"</s>" becomes "{</s>}". The template writes "[a({</s>})]{</s>}", whose first "</s>" is text. A name without marks is made of
parts: by the template, or of a message's text, such as "</S>" in lower case.
"""

from __future__ import annotations

import collections
import enum
import itertools
import json
import re
from typing import Any, NamedTuple

from icejax.checks.errors import InputError
from icejax.text.control_tokens import ControlTokens, Name

PRIVATE = range(0xE000, 0xF900)
WIDTH = 16  # of the marks beside a message's name: a template that cuts some characters off leaves a part of them


class Origin(enum.Enum):
    """Where a name in a rendered text comes from."""

    TEMPLATE = "the template has it"
    MESSAGE = "a message has it"
    CUT = "either a message has it and its end was cut off, or the template has it beside a message whose name it took away"
    PARTS = "neither has it as a whole"


class Marked(NamedTuple):
    """A rendered text without its marks, the names in it and their origins."""

    text: str
    names: list[Name]
    origins: list[Origin]


class Marks:
    """Five marks that are not in a text: around every name, before and after a message's name, and at the end of a chat.

    Attributes:
        around: the marks before and after every name.
        end: the mark at the end of the message to continue.
        controls: the control tokens.
    """

    def __init__(self, controls: ControlTokens, text: str) -> None:
        """Chooses the marks; `text`: the template and all its values as JSON.

        Raises:
            InputError: the text has every private character.
        """
        used = {*text} | {chr(int(code, 16)) for code in re.findall(r"\\u([0-9a-f]{4})", text)}
        free = [*itertools.islice((chr(code) for code in PRIVATE if chr(code) not in used), 5)]
        if len(free) < 5:
            raise InputError("the chat has every private character of Unicode (U+E000 to U+F8FF): leave some of them out")
        self.controls = controls
        self._before, self._behind, *self.around, self.end = free
        # A template may write texts as JSON, with escapes.
        self._forms = {form: mark for mark in free for form in (mark, json.dumps(mark)[1:-1])}

    def names(self, text: str) -> list[str]:
        """Returns the names that a text has, once each."""
        return sorted({text[name.start : name.end] for name in self.controls.find(text)})

    def put(self, value: Any, *, in_template: bool = False) -> Any:
        """Returns a value of JSON with marks around the names in its texts and keys: a message's or the template's."""
        if isinstance(value, str):
            before, behind = ("", "") if in_template else (WIDTH * self._before, WIDTH * self._behind)
            return self._marked(str(value), before + self.around[0], self.around[1] + behind)
        if isinstance(value, list):
            return [self.put(item, in_template=in_template) for item in value]
        if isinstance(value, dict):
            return {
                self.put(key, in_template=in_template): self.put(item, in_template=in_template) for key, item in value.items()
            }
        return value

    def _marked(self, text: str, before: str, behind: str) -> str:
        pieces, end = [], 0
        for name in self.controls.find(text):
            pieces += [text[end : name.start], before, text[name.start : name.end], behind]
            end = name.end
        return "".join([*pieces, text[end:]])

    def read(self, text: str) -> Marked:
        """Returns a rendered text without marks, and its names."""
        pieces, marks, length = [], collections.defaultdict(str), 0  # the marks by their places in the text
        for piece in re.split(f"({'|'.join(map(re.escape, self._forms))})", text):
            if piece in self._forms:
                marks[length] += self._forms[piece]
            else:
                pieces.append(piece)
                length += len(piece)
        plain = "".join(pieces)
        names = self.controls.find(plain)
        return Marked(plain, names, [self._origin(marks.get(name.start, ""), marks.get(name.end, "")) for name in names])

    def _origin(self, before: str, behind: str) -> Origin:
        first, last = self.around
        if not (before.endswith(first) and behind.startswith(last)):
            return Origin.PARTS
        sides = before.endswith(self._before + first), behind.startswith(last + self._behind)
        return Origin.MESSAGE if all(sides) else Origin.CUT if any(sides) else Origin.TEMPLATE
