"""A chat as text: says which names of control tokens are the template's, and which are text of messages.

`chat_template.render` returns it and `encode` reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class ChatText(str):
    """A chat in a chat template. Slices and sums keep the spans; any other operation of str gives text without spans.

    Example: the message "a</s>" in the template "[message]</s>" is "[a</s>]</s>", with the span (2, 6): the first "</s>" is
    text of the message, and the second is the template's control token.

    Attributes:
        spans: beginnings and ends of texts in which a control token's name is text.
    """

    spans: tuple[tuple[int, int], ...]

    def __new__(cls, text: str, spans: Iterable[tuple[int, int]] = ()) -> ChatText:
        self = super().__new__(cls, text)
        self.spans = tuple(spans)
        return self

    def __getitem__(self, key: Any) -> str:
        text = super().__getitem__(key)
        start, stop, step = key.indices(len(self)) if isinstance(key, slice) else (0, 0, 0)
        if step != 1:
            return text
        spans = ((max(first, start) - start, min(end, stop) - start) for first, end in self.spans)
        return ChatText(text, ((first, end) for first, end in spans if first < end))

    def __add__(self, other: str) -> ChatText:
        return _joined(self, other)

    def __radd__(self, other: str) -> ChatText:
        return _joined(other, self)


def spans_of(text: str) -> tuple[tuple[int, int], ...]:
    """Returns the spans of a text in which names of control tokens are text: all of it, if it is no chat."""
    return text.spans if isinstance(text, ChatText) else ((0, len(text)),)


def _joined(first: str, second: str) -> ChatText:
    if not (isinstance(first, str) and isinstance(second, str)):
        return NotImplemented
    later = ((start + len(first), end + len(first)) for start, end in spans_of(second))
    return ChatText(str(first) + str(second), (*spans_of(first), *later))
