"""Control tokens of a tokenizer, such as <|im_end|>, and where a text has their names. `chat_marks` and `encode` call it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from icejax.text.tokenizer_errors import tokenizer_error_from

FORM = re.compile(r"<\|[^<>]+\|>")


class Name(NamedTuple):
    """A control token's name in a text.

    Attributes:
        start, end: its place in the text.
        token: the token's id.
        first, last: its place with the spaces around it that the tokenizer drops.
    """

    start: int
    end: int
    token: int
    first: int
    last: int


class ControlTokens:
    """The special tokens of a tokenizer, and other added tokens like <|im_start|> that its chat template writes.

    Some fine-tunes do not call <|im_start|> special. Qwen's <tool_call> is not special either; it is text, as answers have it.

    Attributes:
        ids: token ids by name; empty for a tokenizer that does not tell its added tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        with tokenizer_error_from("the tokenizer fails"):
            added = getattr(tokenizer, "added_tokens_decoder", None)  # not all tokenizers have the attribute
        templates = str(getattr(tokenizer, "chat_template", None))
        special = {
            token.content: (number, token)
            for number, token in (added.items() if isinstance(added, Mapping) else ())
            if (token.special and token.content.strip()) or (FORM.fullmatch(token.content) and token.content in templates)
        }
        self.ids = {name: number for name, (number, _) in special.items()}
        self._unknown = self.ids.get(getattr(tokenizer, "unk_token", None))
        self._before = {name for name, (_, token) in special.items() if token.lstrip}
        self._behind = {name for name, (_, token) in special.items() if token.rstrip}
        self._lengths = sorted({len(name) for name in special}, reverse=True)
        self._first = re.compile("[" + re.escape("".join({name[0] for name in special})) + "]") if special else None

    def find(self, text: str) -> list[Name]:
        """Returns the names in a text from left to right; of overlapping names the first, of equal beginnings the longest."""
        text, names, end = str(text), [], 0
        for match in self._first.finditer(text) if self._first is not None else ():
            start = match.start()
            if start < end:
                continue
            candidates = (text[start : start + length] for length in self._lengths)
            name = next((candidate for candidate in candidates if candidate in self.ids), None)
            if name is None:
                continue
            first, last = start, start + len(name)
            while name in self._before and first > end and text[first - 1].isspace():
                first -= 1
            end = start + len(name)
            while name in self._behind and last < len(text) and text[last].isspace():
                last += 1
            names.append(Name(start, end, self.ids[name], first, last))
        return names

    def count(self, ids: list[int]) -> int:
        """Returns how many of the token ids are control tokens; the token of unknown text is none, as any text may have it."""
        known = {*self.ids.values()} - {self._unknown}
        return sum(token in known for token in ids)
