"""Token by token to text, as it may be shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer writes for the first bytes of a character


class Detokenizer:
    """Text of a growing list of tokens; what may yet change, or begin a stop string, is held back.

    Attributes:
        stopped: whether a stop string has come; the text ends before it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []
        self._start = self._read = 0  # tokens decoded for context, and tokens whose text is out
        self._held = ""

    def add(self, token: int) -> str:
        """Returns the text that `token` completes."""
        self._tokens.append(token)
        before, text = self._decode(self._read), self._decode(None)
        if text.endswith(UNFINISHED):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return self._release(text[len(before) :])

    def rest(self) -> str:
        """Returns what is still held back, at the end."""
        if self.stopped:
            return ""
        unfinished = self._decode(None)[len(self._decode(self._read)) :]
        self._start = self._read = len(self._tokens)
        text = self._release(unfinished)
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _decode(self, end: int | None) -> str:
        # Decoding a few tokens before the new ones keeps the spaces some tokenizers drop at the start.
        tokens = self._tokens[self._start : end]
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _release(self, text: str) -> str:
        text = self._held + text
        found = [at for at in (text.find(s) for s in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        hold = max((n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]
