"""A model that answers lines of a prompt file, some at a time: in this process, or in one of many (`icejax.ray`)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from icejax.api.generate import stream_generate
from icejax.checks.errors import InputError
from icejax.commands import options
from icejax.commands.loading import load, tell_cache, with_model_sampling
from icejax.commands.many import lines
from icejax.commands.many.lines import Line
from icejax.commands.requests import PromptLine
from icejax.commands.terminal.phases import Phases
from icejax.commands.terminal.show import answer_fields
from icejax.engine.request import Request
from icejax.engine.response import GenerationResponse, join


class Answerer:
    """The model of a command line."""

    def __init__(self, arguments: argparse.Namespace, console: Console) -> None:
        """Loads the model; InputError if an option is out of range, or the model cannot be loaded."""
        self._arguments = arguments
        self._policy, self._limits = options.policy(arguments), options.memory_limits(arguments)
        self._template = dict(
            in_template=arguments.chat, system=arguments.system, arguments=options.template_arguments(arguments)
        )
        self._answer = with_model_sampling(arguments, options.answer(arguments), console)
        self._model, self._tokenizer = load(arguments, console)
        self._read_at = lines.reader(arguments)
        self._tell = lambda reason: tell_cache(arguments, reason, console)

    def _request(self, prompt: PromptLine, line: Line) -> Request:
        try:
            return prompt.request(self._tokenizer, line.index, self._answer, **self._template)
        except InputError as error:
            raise InputError(f"{self._arguments.prompt_file}, line {line.number}: {error}") from None

    def answers(self, some: Sequence[Line], phases: Phases | None = None) -> Iterator[tuple[Line, dict[str, Any]]]:
        """Yields each line and its answer as JSON, as soon as it has ended.

        Raises:
            InputError: before any is answered, if a prompt cannot be; then, if logits are not finite.
        """
        prompts = list(lines.prompts(self._arguments, some, self._read_at))
        requests = [self._request(prompt, line) for prompt, line in zip(prompts, some, strict=True)]
        tell, self._tell = self._tell, None  # once: every answer names its cache
        stream = stream_generate(
            self._model,
            self._tokenizer,
            requests,
            cache=self._policy,
            batch_size=self._arguments.batch_size,
            context_length=self._arguments.context_length,
            tell=tell,
            progress=phases,
            **self._limits,
            **vars(self._answer),
        )
        pieces: dict[int, list[GenerationResponse]] = {}
        for piece in stream:
            pieces.setdefault(piece.row, []).append(piece)
            if piece.finish_reason is not None:
                fields = answer_fields(join(pieces.pop(piece.row)))
                name = prompts[piece.row].id
                yield some[piece.row], fields if name is None else {"id": name} | fields
