"""What is asked: a prompt, and how its answer is to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral

from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import integer
from icejax.engine.sampling import Sampling, checked_sampling
from icejax.text.detokenize import stop_strings

Prompt = str | Sequence[int]
MOST_LOGPROBS = 1000


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How answers are to be; the defaults of `generate`, `Session` and the command line.

    Attributes:
        sampling: how tokens are chosen; None: each is the most likely one.
        max_new_tokens: where an answer ends at the latest.
        stop: a string, or several, that end an answer and are not part of it.
        seed: of the draws; by their index equal prompts draw apart.
        special_tokens: whether the tokenizer adds its own to a text (False for text that has them, as from `chat`).
        logprobs: how many of the most likely tokens are told with each token's own log-probability; None: no log-probabilities.

    Raises:
        InputError: an option is out of range.
    """

    sampling: Sampling | None = None
    max_new_tokens: int = 256
    stop: str | Sequence[str] = ()
    seed: int = 0
    special_tokens: bool = True
    logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling", checked_sampling(self.sampling))
        integer("max_new_tokens", self.max_new_tokens, most=2**63)
        integer("seed", self.seed, least=0, most=2**32 - 1)
        object.__setattr__(self, "stop", stop_strings(self.stop))
        _check_special_tokens(self.special_tokens)
        if self.logprobs is not None:
            integer("logprobs", self.logprobs, least=0, most=MOST_LOGPROBS)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt with answer options of its own; what is None is as the call has it.

    Attributes:
        prompt: text, or token ids.
        sampling, max_new_tokens, stop, special_tokens: as in `AnswerOptions`.
        seed: of its own draws, which then are the same wherever the prompt stands.
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
        checked_sampling(self.sampling)
        if self.index is not None:
            integer("index", self.index, least=0, most=2**32 - 1)
        if self.special_tokens is not None:
            _check_special_tokens(self.special_tokens)

    def options(self, others: AnswerOptions) -> AnswerOptions:
        """Returns the options of its answer, where `others` are those of the call; InputError if its own are out of range."""
        own = {field.name: getattr(self, field.name, None) for field in fields(AnswerOptions)}
        return replace(others, **{name: value for name, value in own.items() if value is not None})


def _check_special_tokens(value: object) -> None:
    if not isinstance(value, bool):
        raise InputError(f"special_tokens must be true or false, got {quoted(value)}")


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
