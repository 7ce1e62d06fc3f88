"""Turns of a chat: the text and the tokens that the next turn appends to a chat that is already in a cache.

`Session` calls it. Example: the cache holds `<u>a<m>` and the answer `b`. With the next question `c` the template writes
`<u>a<m>b<e><u>c<m>`, so `<e><u>c<m>` is appended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from icejax.text.chat_messages import Message
from icejax.text.chat_template import render
from icejax.text.chat_text import ChatText


def next_turn(
    tokenizer: Any, messages: Sequence[Message], question: Message, variables: Mapping[str, Any], *, now: float
) -> tuple[ChatText, str | None]:
    """Returns the whole chat with the question in the chat template, and the part of it after the last answer.

    `variables` and `now` are as in `render`. The part is None without a last answer, or if the template rewrites earlier turns.

    Raises:
        InputError: the template refuses or fails.
    """
    whole = render(tokenizer, [*messages, question], variables, now=now)
    if not messages or messages[-1]["role"] != "assistant":
        return whole, None
    return whole, addition(render(tokenizer, messages[:-1], variables, now=now), messages[-1]["content"], whole)


def addition(before: str, answer: str, whole: str) -> str | None:
    """Returns the text of `whole` after `before` and the answer; None if the template has rewritten one of them.

    Spaces and line breaks around the answer may differ: `before` "<m>", answer " b " and `whole` "<m>b<e>" give "<e>".

    Args:
        before: the messages up to the last question in the chat template, up to where the answer begins.
        answer: the model's answer.
        whole: the messages, the answer and the next question in the chat template.
    """
    if not whole.startswith(before):
        return None
    behind = whole[len(before) :]
    if behind.startswith(answer):
        return behind[len(answer) :]
    # Many templates strip spaces from an answer, some put a space before it.
    behind, answer = behind[len(behind) - len(behind.lstrip()) :], answer.strip()
    return behind[len(answer) :] if behind.startswith(answer) else None


def with_one_end(held: Sequence[int], new: Sequence[int], *, seen: int, ends: Collection[int]) -> tuple[list[int], list[int]]:
    """Returns the held tokens and the tokens to append, with one eos token between them instead of two.

    Examples with the eos tokens 8 and 9: held [1, 9] and new [9, 2] give [1, 9] and [2]. Held [1, 8] and new [9, 2] give [1]
    and [9, 2] if `seen` is 1; if `seen` is 2, the 8 is in the cache already and stays.

    Args:
        held: all tokens so far, which end with the answer.
        new: the tokens that the template puts after the answer, its own eos token first.
        seen: number of `held` tokens in the cache, which cannot be removed.
        ends: the eos tokens.
    """
    held, new = list(held), list(new)
    if held[-1] not in ends:
        return held, new
    if held[-1] == new[0]:
        return held, new[1:]
    return (held[:-1] if seen < len(held) else held), new
