"""Thoughts of a model: takes the pieces of an answer apart into text and reasoning. `engine.decode.loop.Row` calls it.

Two forms are known: marks around the thoughts at the beginning of an answer, and harmony (gpt-oss), whose answers are messages
in channels. Example: in both answers below the reasoning is "A sum." and the text is "4".

    <think>\\nA sum.\\n</think>\\n\\n4
    <|channel|>analysis<|message|>A sum.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from icejax.text.detokenize import decoded

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("◁think▷", "◁/think▷"))
TAIL = 16  # tokens at the end of a prompt in which an opening mark is looked for
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END = "<|end|>"
ENDS = (END, "<|call|>", "<|return|>")
HEADER = 64  # most tokens of the header of a harmony message
THOUGHTS = "analysis"  # harmony's channel of thoughts; every other channel is part of the answer


class Parts(NamedTuple):
    """A piece of an answer.

    Attributes:
        text: the answer's text.
        reasoning: the thoughts' text; None outside thoughts.
    """

    text: str = ""
    reasoning: str | None = None

    def plus(self, other: Parts) -> Parts:
        """Returns both pieces as one."""
        thoughts = [part.reasoning for part in (self, other) if part.reasoning is not None]
        return Parts(self.text + other.text, "".join(thoughts) if thoughts else None)


class Whole:
    """Takes nothing apart: all text is the answer.

    Attributes:
        apart: whether the answer has had thoughts or channels, so that its tokens are not those of its text.
    """

    apart = False

    def take(self, text: str, special: str | None = None) -> Parts:
        """Returns the parts that new text, and the special token after it, complete."""
        return Parts(text)

    def rest(self) -> Parts:
        """Returns the text that was held back, when no more text comes."""
        return Parts()


class Marked(Whole):
    """Thoughts between two marks at the beginning of an answer. Spaces around the marks are dropped.

    Attributes:
        opening, closing: the marks.
    """

    def __init__(self, opening: str, closing: str, *, inside: bool) -> None:
        """Begins before an answer; `inside`: whether the prompt has written the opening mark."""
        self.opening, self.closing = opening, closing
        self._place = "inside" if inside else "before"
        self._held, self._thought, self.apart = "", False, inside

    def take(self, text: str, special: str | None = None) -> Parts:
        self._held += text + (special if special in (self.opening, self.closing) and self._place != "answer" else "")
        reasoning = None
        if self._place == "before":
            start = self._held.lstrip()
            if start.startswith(self.opening):
                self._place, self._held, self.apart = "inside", start[len(self.opening) :], True
            elif self.opening.startswith(start):
                return Parts()  # it may still become the mark
            else:
                self._place = "answer"
        if self._place == "inside":
            reasoning = self._thoughts()
        if self._place == "behind":
            self._held = self._held.lstrip()
            self._place = "answer" if self._held else "behind"
        answer = ""
        if self._place == "answer":
            answer, self._held = self._held, ""
        return Parts(answer, reasoning)

    def rest(self) -> Parts:
        held, self._held = self._held, ""
        if self._place == "inside":
            return Parts(reasoning=(held if self._thought else held.lstrip()).rstrip())
        return Parts(held if self._place == "before" else "")

    def _thoughts(self) -> str:
        """Returns the thoughts that are complete; holds spaces and a beginning of the closing mark back."""
        thoughts, closing, behind = self._held.partition(self.closing)
        if closing:
            self._place = "behind"
        else:
            begun = max(n for n in range(len(self.closing)) if thoughts.endswith(self.closing[:n]))
            thoughts = thoughts[: len(thoughts) - begun]
        out = thoughts.rstrip()
        self._held = behind if closing else self._held[len(out) :]
        out = out if self._thought else out.lstrip()
        self._thought = self._thought or bool(out)
        return out


class Harmony(Whole):
    """Messages in channels: <|start|>role<|channel|>name<|message|>text<|end|>. A tool call keeps its recipient in the text.

    Attributes:
        begun: what the prompt has begun: nothing, the header of a message, its `text`, or the text of `thoughts`.
    """

    def __init__(self, *, header: str | None = None, begun: str = "nothing") -> None:
        """Begins before an answer.

        Args:
            header: the header that the prompt has begun, without its role; None: it has begun none.
        """
        self._header, self._thinks, self.begun = header, begun == "thoughts", begun
        self._roleless = header == ""  # the role is in the prompt: plain text after it is an answer without channels
        self._said: set[bool] = set()  # the kinds of message, thoughts or not, that have had text
        self._first = True
        self.apart = self._thinks

    def take(self, text: str, special: str | None = None) -> Parts:
        parts = self._text(text) if text else Parts()
        return parts if special is None else parts.plus(self._special(special))

    def _text(self, text: str) -> Parts:
        if self._header is None:
            return self._body(text)
        self._header += text
        header = self._header.lstrip()
        if self._roleless and not "to=".startswith(header[:3]):
            text, self._header = self._header, None
            return self._body(text)
        return Parts()

    def _special(self, name: str) -> Parts:
        if name == START:
            self._header = ""
        elif name in (CHANNEL, CONSTRAIN):
            self._header = (self._header or "") + name
        elif name == MESSAGE:
            header, self._header = self._header or "", None
            self._thinks, self._first = _channel(header) == THOUGHTS, True
            recipient = re.search(r"to=[^\s<]+", header)
            self._roleless, self.apart = False, True
            return self._body(recipient[0] + " " if recipient else "")
        elif name in ENDS:
            self._header, self._thinks = None, False
        else:
            return Parts()
        self._roleless, self.apart = False, True
        return Parts()

    def _body(self, text: str) -> Parts:
        if text and self._first:
            text = "\n\n" + text if self._thinks in self._said else text
            self._said.add(self._thinks)
            self._first = False
        return Parts(reasoning=text) if self._thinks else Parts(text)


def _channel(header: str) -> str | None:
    match = re.search(re.escape(CHANNEL) + r"\s*(\w+)", header)
    return match[1] if match else None


def added_tokens(tokenizer: Any) -> dict[str, int]:
    """Returns the ids of the tokenizer's added tokens by text."""
    added = getattr(tokenizer, "added_tokens_decoder", None)  # not all tokenizers have the attribute
    return {token.content: number for number, token in added.items()} if isinstance(added, Mapping) else {}


def is_harmony(tokenizer: Any) -> bool:
    """Says whether a model with this tokenizer answers in harmony messages."""
    return {START, CHANNEL, MESSAGE} <= added_tokens(tokenizer).keys()


def splitter(tokenizer: Any, prompt: Sequence[int]) -> Whole:
    """Returns what takes the answer to `prompt` apart: by the form that the tokenizer or its chat template knows.

    Args:
        prompt: the prompt's token ids; its end may have begun a thought or a message.
    """
    if is_harmony(tokenizer):
        return _harmony(tokenizer, list(prompt))
    added, templates = added_tokens(tokenizer), getattr(tokenizer, "chat_template", None) or ""
    templates = templates.values() if isinstance(templates, Mapping) else [templates]
    for opening, closing in MARKS:
        if closing in added or any(isinstance(template, str) and closing in template for template in templates):
            tail = decoded(tokenizer, list(prompt[-TAIL:]), skip_special_tokens=False)
            return Marked(opening, closing, inside=tail.rstrip().endswith(opening))
    return Whole()


def _harmony(tokenizer: Any, prompt: list[int]) -> Harmony:
    """Returns what takes a harmony answer apart, from the last message that the prompt has begun."""
    added = added_tokens(tokenizer)
    if added[START] not in prompt:
        return Harmony()
    begun = prompt[len(prompt) - prompt[::-1].index(added[START]) :]
    if any(added.get(end) in begun for end in ENDS):
        return Harmony()
    header = decoded(tokenizer, begun[:HEADER], skip_special_tokens=False)
    if MESSAGE in header:
        return Harmony(begun="thoughts" if _channel(header.partition(MESSAGE)[0]) == THOUGHTS else "text")
    return Harmony(header=header[header.index(CHANNEL) :] if CHANNEL in header else "", begun="header")
