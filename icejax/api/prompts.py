"""Prompts to token ids: applies chat templates, tokenizes prompts and checks them.

`api.jobs`, `Session` and the commands call it.
"""

from __future__ import annotations

import itertools
import logging
import operator
import time
from collections.abc import Sequence
from typing import Any

from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import POSITIONS, integer, is_unicode
from icejax.engine.request import Request
from icejax.models.decoder import CausalLM
from icejax.text.chat_messages import Message, checked_messages, template_variables
from icejax.text.chat_template import render
from icejax.text.chat_text import ChatText
from icejax.text.control_tokens import ControlTokens
from icejax.text.encode import encode
from icejax.text.tokenizer_errors import tokenizer_error_from

LOG = logging.getLogger(__name__)
PROBED = (16, 512, 16384)  # characters of the first, short tries of a tokenizer
SLOWEST = 1e-3  # seconds per character that a tokenizer may take; published models' take some 1e-6


class ContextFull(InputError):
    """Raised for a text that leaves no room for an answer in its context. Nothing has run, and a session is as it was.

    Attributes:
        context_length: maximum number of tokens of all texts and answers together.
        held: number of tokens before the text.
        new: number of tokens of the text; at least, where the text is far too long.
    """

    def __init__(self, message: str, *, context_length: int = 0, held: int = 0, new: int = 0) -> None:  # pickle needs defaults
        super().__init__(message)
        self.context_length, self.held, self.new = context_length, held, new


def chat(
    tokenizer: Any,
    prompt: str | Sequence[Message],
    *,
    system: str | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> ChatText:
    """Returns a chat in the tokenizer's chat template, up to where the model's answer begins.

    The text knows which names of control tokens, such as <|im_end|>, the template wrote: those in messages stay text. It has
    the special tokens that the template wrote, and the tokenizer adds none.

    Args:
        prompt: a user's message, or all messages of a chat; the answer continues a last message of the assistant.
        system: the system message before them; None: none. Messages with a system message of their own keep that.
        tools: descriptions of functions that the model may call, as JSON objects; None: none.
        chat_template_kwargs: values of the template's own variables, such as `enable_thinking`.

    Raises:
        InputError: the tokenizer has no chat template, the template refuses the messages or fails, or a message, a tool or a
            variable is none.
    """
    messages = checked_messages("messages", prompt) if isinstance(prompt, (list, tuple)) else [message("user", prompt)]
    before = [] if messages[0]["role"] == "system" else first_messages(system)
    return render(tokenizer, [*before, *messages], template_variables(tools, chat_template_kwargs))


def first_messages(system: str | None) -> list[dict[str, str]]:
    """Returns the first messages of a chat: the system message, or none."""
    return [] if system is None else [message("system", system)]


def message(role: str, content: str) -> dict[str, str]:
    """Returns a message of a chat.

    Raises:
        InputError: the content is no text, or a user's content is empty.
    """
    if not isinstance(content, str):
        raise InputError(f"the {role}'s message must be text, got {quoted(content)}")
    if not content and role == "user":
        raise InputError("a message is empty: expected some text")
    return {"role": role, "content": content}


def encode_prompts(
    model: CausalLM,
    tokenizer: Any,
    requests: Sequence[Request],
    *,
    special_tokens: bool = True,
    parse_special: bool = False,
    context_length: int | None = None,
    continues: bool = False,
) -> list[list[int]]:
    """Returns the token ids of each request's prompt.

    Args:
        special_tokens, parse_special: as in `AnswerOptions`, for requests that leave them open.
        context_length: maximum number of tokens of a prompt and its answer; None: the model's own.
        continues: whether texts follow other text: then the tokenizer puts neither special tokens nor a space in front.

    Raises:
        ContextFull: a prompt leaves no room for an answer token in `context_length`.
        InputError: a prompt is empty, no Unicode text or no token ids; or the tokenizer belongs to another model.
    """
    context_length = _context(model, context_length)
    options = dict(special_tokens=special_tokens, parse_special=parse_special)
    options |= dict(context_length=context_length, continues=continues)
    return [_encoded(model, tokenizer, request, **options) for request in requests]


def _encoded(
    model: CausalLM, tokenizer: Any, request: Request, *, special_tokens: bool, parse_special: bool, context_length: int,
    continues: bool,
) -> list[int]:  # fmt: skip
    """Returns the token ids of a request's prompt; the errors are those of `encode_prompts`."""
    name, prompt, is_cut = f"prompt {request.index + 1}", request.prompt, False
    if isinstance(prompt, str):
        if not is_unicode(prompt):
            raise InputError(f"{name} is not UTF-8 text: convert it first")
        special_tokens = special_tokens if request.special_tokens is None else request.special_tokens
        parse_special = parse_special if request.parse_special is None else request.parse_special
        options = dict(special_tokens=special_tokens, parse_special=parse_special, continues=continues)
        ids, is_cut = _tokens(tokenizer, prompt, enough=2 * context_length, **options)
        if not parse_special and not isinstance(prompt, ChatText):
            _tell_names(name, tokenizer, prompt)
    else:
        ids = _checked_ids(name, prompt)
    if not ids:
        raise InputError(f"{name} is empty: expected some text")
    if len(ids) >= context_length:
        raise ContextFull(
            f"{name} has {'at least ' if is_cut else ''}{len(ids)} tokens and the context holds "
            f"{context_length}, the answer included: shorten it, or raise --context-length if the model can take it",
            context_length=context_length,
            held=0,
            new=len(ids),
        )
    if max(ids) >= model.config.vocab_size:
        reason = "the tokenizer is not the model's" if isinstance(prompt, str) else "they are of another model"
        raise InputError(f"{name} has token {max(ids)} and the model knows {model.config.vocab_size}: {reason}")
    return ids


def _tell_names(name: str, tokenizer: Any, prompt: str) -> None:
    """Logs a warning if a plain prompt has a control token's name, which is read as text."""
    names = ControlTokens(tokenizer).find(prompt)
    if names:
        text = quoted(prompt[names[0].start : names[0].end])
        LOG.warning(
            "%s has the name of the control token %s, which is read as text: parse_special=True (--parse-special) makes it the "
            "token", name, text,
        )  # fmt: skip


def _checked_ids(name: str, prompt: Any) -> list[int]:
    """Returns token ids as a list of ints; numpy integers are accepted."""
    try:
        if isinstance(prompt, (bytes, bytearray, set, dict)) or any(isinstance(token, bool) for token in prompt):
            raise TypeError
        ids = [operator.index(token) for token in prompt]
    except TypeError:
        raise InputError(f"{name} must be text or token ids, got {quoted(prompt)}") from None
    return [integer(f"a token id of {name}", token, least=0) for token in ids]


def check_context(model: CausalLM, context_length: int | None) -> int:
    """Returns the context length in tokens, by default the model's own; logs a warning if it is longer than that.

    Raises:
        InputError: `context_length` is out of range, or `model` is no model.
    """
    if not hasattr(getattr(model, "config", None), "context_length"):
        raise InputError(f"model must be one that icejax.load returns, got {quoted(model)}")
    length, model_length = _context(model, context_length), model.config.context_length
    if length > model_length:
        LOG.warning("a context length of %d is beyond the model's own %d: expect worse answers there", length, model_length)
    return length


def _context(model: CausalLM, context_length: int | None) -> int:
    if context_length is None:
        return model.config.context_length
    return integer("context_length", context_length, most=POSITIONS)


def _tokens(
    tokenizer: Any, prompt: str, *, special_tokens: bool, enough: int, parse_special: bool = False, continues: bool = False
) -> tuple[list[int], bool]:
    """Returns a prompt's tokens, and whether they cover only its first characters.

    Growing numbers of first characters are tokenized, until `enough` tokens or the whole prompt are reached: a tokenizer's
    regular expressions may take forever and cannot be stopped. With `enough=100` they are 16, 200, 800, 3,200, ... characters.
    """
    if not prompt:
        return [], False

    options = dict(special_tokens=special_tokens, parse_special=parse_special, continues=continues)
    short_lengths = (n for n in PROBED if n < 2 * enough)
    for characters in itertools.chain(short_lengths, (2 * enough * 4**i for i in itertools.count())):
        started = time.perf_counter()
        with tokenizer_error_from("the tokenizer fails"):
            ids = encode(tokenizer, prompt[:characters], **options)
        seconds, count = time.perf_counter() - started, min(characters, len(prompt))
        if seconds > 2 + count * SLOWEST:
            raise InputError(
                f"the tokenizer took {seconds:.1f} s for {count} characters, expected thousandths: "
                "look at the regular expressions of tokenizer.json"
            )
        if characters >= len(prompt) or len(ids) >= enough:
            return ids, characters < len(prompt)
