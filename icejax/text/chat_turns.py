"""A chat that goes on: what its next turn adds to the text, and to the tokens, that are there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from icejax.text.chat_template import render


def next_turn(
    tokenizer: Any, messages: Sequence[dict[str, str]], question: dict[str, str], *, now: float
) -> tuple[str, str | None]:
    """Returns all messages and the question in the chat template, and what of this is behind the last answer.

    The second is None where there was no answer, or the template rewrites what was before.

    Raises:
        InputError: the template refuses or fails.
    """
    whole = render(tokenizer, [*messages, question], now=now)
    if not messages or messages[-1]["role"] != "assistant":
        return whole, None
    return whole, addition(render(tokenizer, messages[:-1], now=now), messages[-1]["content"], whole)


def addition(before: str, answer: str, whole: str) -> str | None:
    """Returns what `whole` has behind `before` and the answer; None where the template has rewritten one of them.

    Args:
        before: the messages up to the last question, in the chat template, up to where the answer begins.
        answer: what the model said.
        whole: all these messages and the next question.
    """
    if not whole.startswith(before):
        return None
    behind = whole[len(before) :]
    if behind.startswith(answer):
        return behind[len(answer) :]
    # Many templates trim an answer, some put a space before it.
    behind, answer = behind.lstrip(), answer.strip()
    return behind[len(answer) :] if behind.startswith(answer) else None


def with_one_end(held: Sequence[int], new: Sequence[int], *, seen: int, ends: Collection[int]) -> tuple[list[int], list[int]]:
    """Returns the tokens held and those to add, with one end mark between the two where each brings its own.

    Args:
        held: all tokens so far, the answer's last.
        new: what the template puts behind the answer, which begins with its own end mark.
        seen: how many of `held` are in the cache, from where none can be taken.
        ends: the tokens that end an answer.
    """
    held, new = list(held), list(new)
    if held[-1] not in ends:
        return held, new
    if held[-1] == new[0]:
        return held, new[1:]
    return (held[:-1] if seen < len(held) else held), new
