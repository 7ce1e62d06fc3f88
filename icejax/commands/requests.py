"""The prompts of a command line: from --prompt, stdin, or a file whose lines may have options of their own.

`icejax.commands.generate` calls it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from icejax.api.generate import ASSETS
from icejax.api.prompts import chat
from icejax.checks import json_file
from icejax.checks.errors import InputError, quoted, suggestion
from icejax.checks.numbers import integer, is_unicode
from icejax.commands.loading import context_length
from icejax.commands.texts import read_lines, read_stdin, read_text
from icejax.engine.request import MOST_LOGPROBS, AnswerOptions, Request
from icejax.engine.sampling import Sampling
from icejax.text.chat_messages import Message, checked_messages, template_variables
from icejax.text.detokenize import stop_strings

BUNDLED_PROMPT = ASSETS / "prompt.txt"


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """A prompt, with the options that its line of a .jsonl file sets; None: the option of the command line.

    Attributes:
        prompt: text; None if there are `messages`.
        messages: a chat, each message with a role and a content.
        tools, chat_template_kwargs: of the chat template, as in `api.prompts.chat`.
        id: names the answer in the output.
        sampling: options of `Sampling`.
    """

    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    id: str | int | float | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    logprobs: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)

    def options(self, others: AnswerOptions) -> AnswerOptions:
        """Returns the options of the answer: this line's options over `others`, the options of the command line."""
        changes = dict(max_new_tokens=self.max_new_tokens, seed=self.seed, stop=self.stop, logprobs=self.logprobs)
        changes["sampling"] = dataclasses.replace(others.sampling, **self.sampling)
        return dataclasses.replace(others, **{name: value for name, value in changes.items() if value is not None})

    def request(
        self, tokenizer: Any, index: int, others: AnswerOptions, *, in_template: bool, system: str | None,
        arguments: dict[str, Any],
    ) -> Request:  # fmt: skip
        """Returns the request to answer, in the tokenizer's chat template if it has `messages` or `in_template` is set.

        Args:
            index: index of the prompt on the command line.
            others: the options of the command line.
            in_template: whether a text becomes the user's message of a chat.
            system: system message of the chat; None: the template's own, if it has one.
            arguments: variables of the template; those of the line count before them.
        """
        text, is_chat = self.prompt, in_template or self.messages is not None
        if is_chat:
            variables = arguments | (self.chat_template_kwargs or {})
            text = chat(tokenizer, self.messages or text, system=system, tools=self.tools, chat_template_kwargs=variables)
        options = self.options(others)
        fields = dict(sampling=options.sampling, max_new_tokens=options.max_new_tokens, stop=options.stop)
        fields["logprobs"] = options.logprobs
        return Request(prompt=text, special_tokens=not is_chat, index=index, seed=self.seed, **fields)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name} must be text, got {quoted(value)}")
    if not is_unicode(value):
        raise InputError(f"{name} must be Unicode text: it has half of a surrogate pair")
    return value


def _id(name: str, value: Any) -> str | int | float:
    valid = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    if not valid or (isinstance(value, float) and not math.isfinite(value)) or not is_unicode(str(value)):
        raise InputError(f"{name} must be text or a number, got {quoted(value)}")
    return value


def _with_place(check: Callable[[Any], Any]) -> Callable[[str, Any], Any]:
    """Returns the check with messages that begin with the place of the value; the messages of `check` name the value."""

    def check_at(name: str, value: Any) -> Any:
        try:
            return check(value)
        except InputError as error:
            raise InputError(f"{name.rpartition(':')[0]}: {error}") from None

    return check_at


def _sampling_option(option: str) -> Callable[[str, Any], Any]:
    """Returns the check of an option of `Sampling`."""
    return _with_place(lambda value: getattr(Sampling(**{option: value}), option))


SAMPLING = tuple(option.name for option in dataclasses.fields(Sampling))
# Keys of a line, and the check of each value.
FIELDS: dict[str, Callable[[str, Any], Any]] = {
    "prompt": _text,
    "messages": checked_messages,
    "tools": _with_place(lambda value: template_variables(value).get("tools")),
    "chat_template_kwargs": _with_place(lambda value: template_variables(arguments=value)),
    "id": _id,
    "max_new_tokens": integer,
    "seed": lambda name, value: integer(name, value, least=0, most=2**32 - 1),
    "stop": _with_place(stop_strings),
    "logprobs": lambda name, value: integer(name, value, least=0, most=MOST_LOGPROBS),
    **{option: _sampling_option(option) for option in SAMPLING},
}


def read_prompts(arguments: argparse.Namespace) -> list[PromptLine]:
    """Returns the prompts of the command line; InputError if there is none, or one cannot be read."""
    texts = [*arguments.text, *arguments.prompt]
    if arguments.text and len(texts) > 1:
        raise InputError(
            f"expected one prompt where a plain argument is given, got {quoted(texts[0])} and {quoted(texts[1])}: "
            "put a prompt of several words in quotes, or give each prompt as --prompt TEXT"
        )
    if texts.count("-") > 1:
        raise InputError("--prompt - is given more than once: standard input can be read only once")
    prompt_lines, path = [], arguments.prompt_file
    for prompt in texts:
        text = read_stdin(context_length=context_length(arguments)) if prompt == "-" else prompt
        prompt_lines.append(PromptLine(prompt=text))
    if path is None and not prompt_lines:
        if arguments.model is not None:
            raise InputError("no prompt: give --prompt TEXT, --prompt - or --prompt-file FILE")
        path = BUNDLED_PROMPT
    if path is None:
        return prompt_lines
    length = context_length(arguments)
    if path.suffix != ".jsonl":
        return [*prompt_lines, PromptLine(prompt=read_text(path, context_length=length))]
    prompt_lines += [prompt_line(source, line) for source, line in read_lines(path, context_length=length)]
    if not prompt_lines:
        raise InputError(f"{path} holds no prompt: expected one JSON object with 'prompt' or 'messages' per line")
    return prompt_lines


def check_template_use(lines: list[PromptLine], arguments: argparse.Namespace) -> None:
    """Raises InputError if options of a template are given for a prompt that no template renders, or within a session."""
    if not arguments.chat and all(line.messages is None for line in lines):
        for flag, value in (("--chat-template", arguments.chat_template), ("--template-arg", arguments.template_arg)):
            if value:
                raise InputError(f"{flag} needs --chat, or 'messages' in a .jsonl file: no prompt is put into a template")
    for line in lines:
        name = "tools" if line.tools else "chat_template_kwargs"
        if getattr(line, name) and not arguments.chat and line.messages is None:
            raise InputError(f"{name!r} of a line needs 'messages' or --chat: the prompt is not put into a template")
        if getattr(line, name) and arguments.session is not None:
            raise InputError(f"{name!r} of a line cannot change a session: give --template-arg when the session begins")


def prompt_line(source: str, line: str) -> PromptLine:
    """Returns the prompt in a line of a .jsonl file; InputError, which begins with `source`, if it is none."""
    fields = {name: value for name, value in json_file.parse(line, source=source).items() if value is not None}
    for name in fields:
        if name not in FIELDS:
            raise InputError(f"{source}: unknown key {quoted(name)}: expected {', '.join(FIELDS)}{suggestion(name, FIELDS)}")
    if ("prompt" in fields) == ("messages" in fields):
        count = "both" if "prompt" in fields else "neither"
        raise InputError(f"{source}: expected a text 'prompt' or a list of 'messages' in the JSON object, got {count}")
    values = {name: FIELDS[name](f"{source}: {name!r}", value) for name, value in fields.items()}
    sampling = {name: values.pop(name) for name in SAMPLING if name in values}
    return PromptLine(**values, sampling=sampling)
