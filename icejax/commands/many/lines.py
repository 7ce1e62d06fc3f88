"""The lines of a prompt file of any size: where each is, and which answer is its own. `icejax.commands.many.run` calls it."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from icejax.checks.errors import InputError
from icejax.checks.numbers import POSITIONS
from icejax.commands import options
from icejax.commands.loading import context_length
from icejax.commands.requests import PromptLine, prompt_line
from icejax.commands.texts import numbered_lines, read_template, text_at

# Options that an answer depends on.
OPTIONS = ("model", "revision", "dtype", "quantize", "chat", "system", "template_arg", "parse_special", "stop")
OPTIONS += ("max_new_tokens", "sampling", "seed", "logprobs", "cache", *options.OF_CACHE, "cache_option", "context_length")


@dataclass(frozen=True)
class Line:
    """A line of a prompt file.

    Attributes:
        number: of the line, from 1.
        index: of the prompt among those of the file, from 0; without a seed of its own its draws depend on it.
        start: its first byte; in a Parquet file, the number of rows before it.
        key: SHA-256 of the line, its number and the options of the run, of which an answer is the answer.
    """

    number: int
    index: int
    start: int
    key: str


@dataclass
class Lines:
    """The lines of a prompt file.

    Attributes:
        all: the lines.
        kinds: a prompt of each kind that the command line's options are checked against.
    """

    all: list[Line] = field(default_factory=list)
    kinds: dict[Any, PromptLine] = field(default_factory=dict)


def identity(arguments: argparse.Namespace) -> str:
    """Returns the options of the command line that an answer depends on, as text."""
    named = {name: getattr(arguments, name) for name in OPTIONS} | options.sampling(arguments)
    template = None if arguments.chat_template is None else read_template(arguments.chat_template)
    return json.dumps(named | {"chat_template": template}, sort_keys=True, default=str)


def key(options_text: str, number: int, text: str) -> str:
    """Returns the key of a line under the options of `identity`."""
    return hashlib.sha256(json.dumps([options_text, number, text]).encode()).hexdigest()[:32]


def read(arguments: argparse.Namespace) -> Lines:
    """Returns the lines of --prompt-file, each of which has been checked; InputError if one is no prompt, or none is there."""
    path, lines, options_text = arguments.prompt_file, Lines(), identity(arguments)
    if _is_parquet(path):
        from icejax.commands.many.parquet import rows  # it imports pyarrow

        found = rows(path)
    else:
        found = numbered_lines(path, context_length=context_length(arguments))
    for number, start, text in found:
        prompt = prompt_line(f"{path}, line {number}", text)
        kind = prompt.messages is None, bool(prompt.tools), bool(prompt.chat_template_kwargs), str(prompt.sampling)
        lines.kinds.setdefault(kind, dataclasses.replace(prompt, prompt="", messages=None if prompt.messages is None else []))
        lines.all.append(Line(number, len(lines.all), start, key(options_text, number, text)))
    if not lines.all:
        raise InputError(f"{path} holds no prompt: expected one JSON object with 'prompt' or 'messages' per line")
    return lines


def reader(arguments: argparse.Namespace) -> Callable[[int], str]:
    """Returns what reads a line of --prompt-file by its `start`."""
    path = Path(arguments.prompt_file)
    if _is_parquet(path):
        from icejax.commands.many.parquet import Rows

        return Rows(path).text_at
    return partial(text_at, path, context_length=arguments.context_length or POSITIONS)


def prompts(arguments: argparse.Namespace, lines: Sequence[Line], read_at: Callable[[int], str]) -> Iterator[PromptLine]:
    """Yields the prompts of some lines, read again; InputError if the file is no longer the one that was read at first.

    Args:
        read_at: what `reader` returns; lines in ascending order are read fastest.
    """
    path, options_text = Path(arguments.prompt_file), identity(arguments)
    for line in lines:
        text = read_at(line.start)
        if key(options_text, line.number, text) != line.key:
            raise InputError(f"{path} has changed since the run began, in line {line.number}: begin the run again")
        yield prompt_line(f"{path}, line {line.number}", text)


def _is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"
