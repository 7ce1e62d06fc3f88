"""The setting of icejax's own tasks: the model's tokenizer and context, and the command line's options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from icejax.checks.errors import InputError
from icejax.evaluation.harness import HarnessModel

TEMPLATE = 64  # least tokens that generated samples leave for a chat template


@dataclass(frozen=True, eq=False)  # counts of tokens are cached by setting
class Setting:
    """The setting of tasks.

    Attributes:
        model: the model that answers; its tokenizer counts tokens.
        data: folder of local files.
        limit: number of samples of each task that are asked for; None: all.
        chat_tokens: number of tokens that the chat template and the system message add to a prompt; 0 without a template.
        lengths: numbers of tokens of the samples, prompt and answer together; None: the task's own.
        text: the file whose perplexity is measured.
    """

    model: HarnessModel
    data: Path | None = None
    limit: int | None = None
    chat_tokens: int = 0
    lengths: tuple[int, ...] | None = None
    text: Path | None = None

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a prompt and its answer."""
        return self.model.max_length

    @property
    def template_tokens(self) -> int:
        """Number of tokens that generated samples leave for the chat template and the system message."""
        return max(TEMPLATE, self.chat_tokens)

    def lengths_for(self, task: str, proposed: Sequence[int], *, least: int) -> list[int]:
        """Returns the lengths asked for, or else the proposed ones that fit.

        Args:
            least: the least length that leaves room for a sample beside a template of `TEMPLATE` tokens.

        Raises:
            InputError: a length asked for does not fit the context or has no room for a sample, or no proposed one fits.
        """
        least += self.template_tokens - TEMPLATE
        asked = list(self.lengths or [length for length in proposed if least <= length <= self.context_length])
        if not asked or min(asked) < least or max(asked) > self.context_length:
            got = f", got {', '.join(map(str, asked))}" if self.lengths else ""
            raise InputError(f"the task {task} needs --lengths from {least} to the context of {self.context_length}{got}")
        return asked

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text, with or without bos."""
        return self.model.tok_encode(text, add_special_tokens=add_special_tokens)

    def count(self, text: str) -> int:
        """Returns the number of tokens of a text without special tokens."""
        return len(self.encode(text, add_special_tokens=False))
