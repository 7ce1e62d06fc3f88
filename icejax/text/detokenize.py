"""Token by token to text, as it may be shown."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from icejax.checks.errors import InputError, input_error_from, quoted
from icejax.checks.numbers import is_unicode

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer writes for the first bytes of a character
OF_ONE = 3  # tokens at most that are the beginning of a character: it has four bytes
MOST_UNFINISHED = 16  # tokens that all leave a character unfinished: then they are no text


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Returns one stop string or several as a tuple; InputError for one that is empty or no text."""
    if not isinstance(stop, Sequence):
        raise InputError(f"stop must be a string or several in a list, got {quoted(stop)}")
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    for each in stop:
        if not isinstance(each, str):
            raise InputError(f"a stop string must be text, got {quoted(each)}")
        if not each:
            raise InputError("a stop string is empty: expected some text")
        if not is_unicode(each):
            raise InputError(f"a stop string must be Unicode text, got {quoted(each)}: a lone surrogate can never match")
    return stop


def decoded(tokenizer: Any, tokens: list[int], **options: bool) -> str:
    """Returns the text of tokens, a question mark for what no output takes; InputError where the tokenizer fails."""
    with input_error_from("the tokenizer fails"):
        return tokenizer.decode(tokens, **options).encode(errors="replace").decode()


class Detokenizer:
    """Text of a growing list of tokens; what may yet change, or begin a stop string, is held back.

    Special tokens are no text, but one that is a stop string itself ends it.

    Attributes:
        stopped: whether a stop string has come; the text ends before it.

    Raises:
        InputError: a stop string has a special token beside other text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        added = getattr(tokenizer, "added_tokens_decoder", None)  # which not all tokenizers have
        added = added if isinstance(added, Mapping) else {}
        self._special = {number: token.content for number, token in added.items() if token.special}
        for each in stop:
            for name in self._special.values():
                if name and name in each and name != each:
                    raise InputError(
                        f"stop string {quoted(each)} holds the special token {quoted(name)}, which is no text: give it alone"
                    )
        self._tokenizer, self._stop = tokenizer, sorted(stop)
        self._longest = max(map(len, stop), default=0)
        self._tokens: list[int] = []
        self._start = self._read = 0  # tokens decoded for context, and tokens whose text is out
        self._held = ""

    def add(self, token: int) -> str:
        """Returns the text that `token` completes."""
        if token in self._special:
            if self._special[token] in self._stop:
                text, self.stopped = self.rest(), True
                return text
            held, self._held = self._held, ""  # no stop string goes on behind it
            return held
        self._tokens.append(token)
        end, text = len(self._tokens), self._decode(None)
        if text.endswith(UNFINISHED):
            if end - self._read < MOST_UNFINISHED:
                return ""
            end -= OF_ONE  # which may become a character yet
            text = self._decode(end)
        before = self._decode(self._read)
        self._start, self._read = self._read, end
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
        return decoded(self._tokenizer, tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _release(self, text: str) -> str:
        text = self._held + text
        places = [at for at in (text.find(s) for s in self._stop) if at >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        start = max(0, len(text) - self._longest)
        while start < len(text) and not self._begins_stop(text[start:]):
            start += 1
        self._held = text[start:]
        return text[:start]

    def _begins_stop(self, text: str) -> bool:
        # In order, what begins with the text comes right behind it.
        at = bisect.bisect_left(self._stop, text)
        return at < len(self._stop) and self._stop[at].startswith(text)
