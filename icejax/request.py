"""A prompt with wishes of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral

from icejax.errors import InputError, quoted

Prompt = str | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt that says how its own answer is to be; what is None is as the call has it.

    Attributes:
        prompt: text, or token ids.
        max_new_tokens, stop: where the answer ends.
        seed: of its own draws, which then are the same wherever the prompt stands.
        special_tokens: whether the tokenizer adds its own to the text.
        index: which prompt of a run this is, by which equal prompts draw apart; None: its place in the call.
    """

    prompt: Prompt
    max_new_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    seed: int | None = None
    special_tokens: bool | None = None
    index: int | None = None


def requests(prompts: Prompt | Request | Sequence[Prompt | Request]) -> list[Request]:
    """Returns one prompt or several as requests that have an index; InputError for what cannot be prompts."""
    if isinstance(prompts, (str, Request)):
        prompts = [prompts]
    try:
        several = list(prompts)
    except TypeError:
        raise InputError(f"prompts must be text, token ids, or several of them, got {quoted(prompts)}") from None
    if several and isinstance(several[0], Integral):  # the token ids of one prompt
        several = [several]
    found = [each if isinstance(each, Request) else Request(prompt=each) for each in several]
    return [each if each.index is not None else replace(each, index=i) for i, each in enumerate(found)]
