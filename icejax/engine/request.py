"""Requests: a prompt, and the options of its answer. The API, sessions and the command line make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

from icejax.checks.errors import InputError, quoted, suggestion
from icejax.checks.numbers import integer
from icejax.engine.sampling import Sampling, checked_sampling
from icejax.text.detokenize import stop_strings
from icejax.text.grammar.rules import Grammar

Prompt = str | Sequence[int]
MOST_LOGPROBS = 1000  # most likely tokens that may be reported with each token


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Options of an answer, with the defaults of `generate`, `Engine`, `Session` and the command line.

    Attributes:
        sampling: sampling options; None: greedy.
        max_new_tokens: maximum number of answer tokens.
        stop: one or several strings that end an answer; the answer leaves them out.
        seed: seed of the draws, from 0 to 2^32 - 1. Each prompt's index is folded in, so equal prompts draw differently.
        special_tokens: whether the tokenizer adds special tokens to a text; one from `chat` has the template's and gets none.
        parse_special: whether the name of a control token, such as <|im_end|>, is that token in messages and plain prompts too;
            False: it is text there, and the token only where the chat template wrote it.
        logprobs: number of most likely tokens to report with each token's own log-probability, at most 1,000; None: no
            log-probabilities.

    Raises:
        InputError: an option is out of range.
    """

    sampling: Sampling | None = None
    max_new_tokens: int = 256
    stop: str | Sequence[str] = ()
    seed: int = 0
    special_tokens: bool = True
    parse_special: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling", checked_sampling(self.sampling))
        integer("max_new_tokens", self.max_new_tokens, most=2**63)
        integer("seed", self.seed, least=0, most=2**32 - 1)
        object.__setattr__(self, "stop", stop_strings(self.stop))
        _check_flags(special_tokens=self.special_tokens, parse_special=self.parse_special)
        if self.logprobs is not None:
            integer("logprobs", self.logprobs, least=0, most=MOST_LOGPROBS)


def answer_options(options: dict[str, Any]) -> AnswerOptions:
    """Returns the keyword arguments of a call as answer options.

    Raises:
        InputError: an option is out of range.
        TypeError: there is no such option; the message names the closest one, or the place of an option of `Sampling`.
    """
    known = [field.name for field in fields(AnswerOptions)]
    for name in options:
        if name in [field.name for field in fields(Sampling)]:
            raise TypeError(f"{name!r} is an option of sampling: give sampling=icejax.Sampling({name}=...)")
        if name not in known:
            raise TypeError(f"there is no option {name!r}: expected one of {', '.join(known)}{suggestion(name, known)}")
    return AnswerOptions(**options)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt with its own answer options; an option that is None comes from the call.

    Attributes:
        prompt: text, or token ids.
        sampling, max_new_tokens, stop, special_tokens, parse_special, logprobs: as in `AnswerOptions`.
        seed: seed of this prompt's draws, which then do not depend on its index.
        index: number of the prompt in its run, from 0, folded into the call's seed; None: its place in the call.
        forced_tokens: token ids that are the answer, in place of the model's choices (teacher forcing). They alone end it, and
            `logprobs` gives the log-probability of each. None: the model answers.
        prompt_logprobs: number of most likely tokens to report with the log-probability of each prompt token but the first, at
            most 1,000, from exact attention. Such a prompt uses no cached prefix. None: none are reported.
        grammar: what the answer's text may be, such as `Grammar.json_schema({...})`; thoughts before it are free. The answer
            ends with `stop` where the grammar ends. None: it may be anything.
        explain: whether pieces of the answer have their `attention`. Such a prompt uses no cached prefix, and steps of its row
            wait for the host.
        whole_text: whether thoughts and their marks stay in the `text` of an answer; False: thoughts are its `reasoning`.

    Raises:
        InputError: a number, a forced token or a flag is out of range, `sampling` is no `Sampling`, `grammar` is no `Grammar`,
            or the request has forced tokens too.
    """

    prompt: Prompt
    sampling: Sampling | None = None
    max_new_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    seed: int | None = None
    special_tokens: bool | None = None
    parse_special: bool | None = None
    logprobs: int | None = None
    index: int | None = None
    forced_tokens: Sequence[int] | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    explain: bool = False
    whole_text: bool = False

    def __post_init__(self) -> None:
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InputError(f"grammar must be an icejax.Grammar, got {quoted(self.grammar)}")
        if self.grammar is not None and self.forced_tokens is not None:
            raise InputError("a request has forced_tokens and a grammar: give one of them")
        if self.prompt_logprobs is not None:
            integer("prompt_logprobs", self.prompt_logprobs, least=0, most=MOST_LOGPROBS)
        checked_sampling(self.sampling)
        if self.index is not None:
            integer("index", self.index, least=0, most=2**32 - 1)
        if self.forced_tokens is not None:
            if not len(self.forced_tokens):
                raise InputError("forced_tokens must hold at least one token id, got none: leave it out, or name the answer")
            forced = tuple(integer("a token of forced_tokens", token, least=0) for token in self.forced_tokens)
            object.__setattr__(self, "forced_tokens", forced)
        flags = dict(special_tokens=self.special_tokens, parse_special=self.parse_special, explain=self.explain)
        flags |= dict(whole_text=self.whole_text)
        _check_flags(**{name: value for name, value in flags.items() if value is not None})

    def options(self, others: AnswerOptions) -> AnswerOptions:
        """Returns the answer options of this request, the call's options `others` where it has none.

        Raises:
            InputError: an option of the request is out of range.
        """
        values = {field.name: getattr(self, field.name, None) for field in fields(AnswerOptions)}
        if self.forced_tokens is not None:
            values |= dict(max_new_tokens=len(self.forced_tokens), stop=())
        return replace(others, **{name: value for name, value in values.items() if value is not None})


def _check_flags(**flags: object) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InputError(f"{name} must be true or false, got {quoted(value)}")


def requests(prompts: Prompt | Request | Sequence[Prompt | Request]) -> list[Request]:
    """Returns one prompt or several as requests with an index.

    Raises:
        InputError: `prompts` holds no prompt, or something else.
    """
    if isinstance(prompts, (str, Request)):
        prompts = [prompts]
    try:
        items = list(prompts)
    except TypeError:
        raise InputError(f"prompts must be text, token ids, or several of them, got {quoted(prompts)}") from None
    if isinstance(prompts, (bytes, bytearray, set, dict)) or (items and isinstance(items[0], Integral)):
        items = [prompts]  # the token ids of one prompt, or a type that `api.prompts` refuses
    if not items:
        raise InputError("no prompt: expected at least one")
    requests = [item if isinstance(item, Request) else Request(prompt=item) for item in items]
    return [request if request.index is not None else replace(request, index=i) for i, request in enumerate(requests)]
