"""The messages of a chat session: an answer grows piece by piece, and the last turn can be taken back. `Session` calls it.

A message has a role and a content; an answer with thoughts also has `reasoning`.
"""

from __future__ import annotations

import logging
from typing import Any

from icejax.api.prompts import message
from icejax.checks.errors import InputError
from icejax.engine.response import GenerationResponse
from icejax.text.chat_messages import template_variables

LOG = logging.getLogger(__name__)
SHORT = 64  # tokens of a chat below which a prefill takes no time worth a warning


def grow(answer: dict[str, str], piece: GenerationResponse) -> None:
    """Adds the newest piece of an answer to its message."""
    answer["content"] += piece.text
    if piece.reasoning is not None:
        answer["reasoning"] = answer.get("reasoning", "") + piece.reasoning


def take_back(messages: list[dict[str, str]]) -> str:
    """Removes the last question and its answer; returns the question.

    Raises:
        InputError: there is no answer yet.
    """
    if not has_answer(messages):
        raise InputError("there is no answer to take back: ask something first")
    question = messages[-2]["content"]
    del messages[-2:]
    return question


def asked(messages: list[dict[str, str]], text: str | None) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Returns the messages before the user's message `text`, and this message; None: the last one, to be answered again.

    Raises:
        InputError: the text is empty, or there is no answer yet.
    """
    if text is not None:
        return messages, message("user", text)
    before = [*messages]
    question = take_back(before)
    return before, message("user", question)


def has_answer(messages: list[dict[str, str]]) -> bool:
    """Says whether a chat has an answer."""
    return any(item["role"] == "assistant" for item in messages)


def tell_anew(outdated: bool, *, tokens: int) -> bool:
    """Logs why a chat of `tokens` tokens is prefilled again, with a warning unless it is short; returns whether it warned.

    Args:
        outdated: whether the cache holds what the chat leaves out.
    """
    left_out = "the cache holds thoughts, a stop string or a turn that the chat leaves out"
    reason = left_out if outdated else "the chat template rewrites earlier turns"
    LOG.log(logging.INFO if tokens < SHORT else logging.WARNING, "%s: the conversation is prefilled again", reason)
    return tokens >= SHORT


def is_chat(value: Any) -> bool:
    """Says whether a value from a file is a chat: perhaps a system message, then questions, each with its answer."""
    if not isinstance(value, list) or not all(map(_is_message, value)):
        return False
    roles = [item["role"] for item in value]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    return turns == ["user", "assistant"] * (len(turns) // 2)


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        return False
    return {"role", "content"} <= value.keys() <= {"role", "content", "reasoning"}


def is_template_variables(value: Any) -> bool:
    """Says whether a value from a file holds variables of a chat template."""
    if not isinstance(value, dict):
        return False
    arguments = {name: item for name, item in value.items() if name != "tools"}
    try:
        return template_variables(value.get("tools"), arguments) == value
    except InputError:
        return False
