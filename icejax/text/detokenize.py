"""Tokens to text, one token at a time; text that may still change is held back. The decode loop calls it per row.

Example: the stop string is "END". The tokens "a", " ", "E", "N" give "a", " ", "", "", because "EN" may become "END". A next
token "O" gives "ENO"; a next token "D" gives "" and stops the text.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import is_unicode
from icejax.text.tokenizer_errors import tokenizer_error_from

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # a tokenizer writes it for an incomplete UTF-8 character
OF_ONE = 3  # most tokens that an incomplete character can have: a character has at most four bytes
MOST_UNFINISHED = 16  # tokens without a complete character, after which their bytes count as no text


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Returns one or several stop strings as a tuple.

    Raises:
        InputError: a stop string is empty or no Unicode text.
    """
    if not isinstance(stop, Sequence):
        raise InputError(f"stop must be a string or several in a list, got {quoted(stop)}")
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in stop:
        if not isinstance(string, str):
            raise InputError(f"a stop string must be text, got {quoted(string)}")
        if not string:
            raise InputError("a stop string is empty: expected some text")
        if not is_unicode(string):
            raise InputError(f"a stop string must be Unicode text, got {quoted(string)}: a lone surrogate can never match")
    return stop


def special_names(tokenizer: Any) -> dict[int, str]:
    """Returns the names of a tokenizer's special tokens by id."""
    added = getattr(tokenizer, "added_tokens_decoder", None)  # not all tokenizers have the attribute
    added = added if isinstance(added, Mapping) else {}
    return {number: token.content for number, token in added.items() if token.special}


def check_stops(tokenizer: Any, stop: Sequence[str], *, place: str = "") -> None:
    """Raises InputError if a stop string combines a special token with other text; the message begins with `place`."""
    for string in stop:
        for name in special_names(tokenizer).values():
            if name and name in string and name != string:
                told = f"stop string {quoted(string)} holds the special token {quoted(name)}, which is no text: give it alone"
                raise InputError(f"{place}{told}")


def decoded(tokenizer: Any, tokens: list[int], **options: bool) -> str:
    """Returns the text of tokens, with a question mark for each lone surrogate, which no output could encode.

    Raises:
        InputError: the tokenizer fails.
    """
    with tokenizer_error_from("the tokenizer fails"):
        return tokenizer.decode(tokens, **options).encode(errors="replace").decode()


class Detokenizer:
    """The text of a growing list of tokens. An incomplete character, or the beginning of a stop string, is held back.

    Special tokens are left out of the text; a special token that is a stop string ends the text. The text is what the tokens
    add to the text of the tokens `before`: SentencePiece's "▁he" gives " he" after other text, and "he" as the first token.

    Attributes:
        stopped: whether a stop string has come; the text ends before it.

    Raises:
        InputError: a stop string combines a special token with other text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), *, before: Sequence[int] = ()) -> None:
        check_stops(tokenizer, stop)
        self.stopped, self._special = False, special_names(tokenizer)
        self._tokenizer, self._stop = tokenizer, sorted(stop)
        self._longest = max(map(len, stop), default=0)
        self._tokens = self._context(before)
        self._start, self._read = 0, len(self._tokens)  # first token that is decoded as context; first with unreturned text
        self._held = ""

    def add(self, token: int) -> str:
        """Returns the text that `token` completes; empty while text is held back."""
        if token in self._special:
            if self._special[token] in self._stop:
                text, self.stopped = self.rest(), True
                return text
            held, self._held = self._held, ""  # a stop string never continues across a special token
            return held
        self._tokens.append(token)
        end, text = len(self._tokens), self._decode(None)
        if text.endswith(UNFINISHED):
            if end - self._read < MOST_UNFINISHED:
                return ""
            end -= OF_ONE  # the last tokens may still become a character
            text = self._decode(end)
        before = self._decode(self._read)
        self._start, self._read = self._read, end
        return self._release(text[len(before) :])

    def special(self, token: int) -> str | None:
        """Returns the text of a special token, which `add` leaves out; None if `token` is none."""
        return self._special.get(token)

    def rest(self) -> str:
        """Returns the text that is still held back, when no more tokens come."""
        if self.stopped:
            return ""
        unfinished = self._decode(None)[len(self._decode(self._read)) :]
        self._start = self._read = len(self._tokens)
        text = self._release(unfinished)
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _context(self, before: Sequence[int]) -> list[int]:
        """Returns the fewest last tokens of `before` that end with a complete character; none if the text ends within one."""
        newest = itertools.islice((token for token in reversed(before) if token not in self._special), OF_ONE + 1)
        tokens = [*newest][::-1]
        contexts = (tokens[start:] for start in reversed(range(len(tokens))))
        return next((context for context in contexts if not self._text_of(context).endswith(UNFINISHED)), [])

    def _decode(self, end: int | None) -> str:
        # A few earlier tokens are decoded too: some tokenizers drop the space of a text's first token.
        return self._text_of(self._tokens[self._start : end])

    def _text_of(self, tokens: list[int]) -> str:
        return decoded(self._tokenizer, tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _release(self, text: str) -> str:
        """Returns the held text and `text` up to a stop string, or up to where one may begin, and holds the rest back."""
        text = self._held + text
        stop_positions = [position for position in (text.find(s) for s in self._stop) if position >= 0]
        if stop_positions:
            self.stopped, self._held = True, ""
            return text[: min(stop_positions)]
        start = max(0, len(text) - self._longest)
        while start < len(text) and not self._begins_stop(text[start:]):
            start += 1
        self._held = text[start:]
        return text[:start]

    def _begins_stop(self, text: str) -> bool:
        # In the sorted list, the first string that begins with `text` stands where `text` would be inserted.
        place = bisect.bisect_left(self._stop, text)
        return place < len(self._stop) and self._stop[place].startswith(text)
