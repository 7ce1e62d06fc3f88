"""A prompt with wishes of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral

from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import whole
from icejax.engine.sampling import Sampling, checked

Prompt = str | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt that says how its own answer is to be; what is None is as the call has it.

    Attributes:
        prompt: text, or token ids.
        sampling: how its tokens are chosen; the rows of a batch may differ.
        max_new_tokens, stop: where the answer ends.
        seed: of its own draws, which then are the same wherever the prompt stands.
        special_tokens: whether the tokenizer adds its own to the text.
        index: which prompt of a run this is, by which equal prompts draw apart; None: its place in the call.

    Raises:
        InputError: the index or `special_tokens` is out of range, or `sampling` is something else.
    """

    prompt: Prompt
    sampling: Sampling | None = None
    max_new_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    seed: int | None = None
    special_tokens: bool | None = None
    index: int | None = None

    def __post_init__(self) -> None:
        checked(self.sampling)
        if self.index is not None:
            whole("index", self.index, least=0, most=2**32 - 1)
        if self.special_tokens is not None and not isinstance(self.special_tokens, bool):
            raise InputError(f"special_tokens must be true or false, got {quoted(self.special_tokens)}")


def requests(prompts: Prompt | Request | Sequence[Prompt | Request]) -> list[Request]:
    """Returns one prompt or several as requests that have an index; InputError for what cannot be prompts."""
    if isinstance(prompts, (str, Request)):
        prompts = [prompts]
    try:
        several = list(prompts)
    except TypeError:
        raise InputError(f"prompts must be text, token ids, or several of them, got {quoted(prompts)}") from None
    if isinstance(prompts, (bytes, bytearray, set, dict)) or (several and isinstance(several[0], Integral)):
        several = [prompts]  # the token ids of one prompt, or what is to be refused as such
    requests = [each if isinstance(each, Request) else Request(prompt=each) for each in several]
    return [each if each.index is not None else replace(each, index=i) for i, each in enumerate(requests)]
