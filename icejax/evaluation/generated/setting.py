"""What a generated task is made from: the model's tokenizer and context, and what the command line gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from icejax.checks.errors import InputError

TEMPLATE = 64  # tokens that are left for a chat template


@dataclass(frozen=True)
class Setting:
    """The setting of generated tasks.

    Attributes:
        encode: returns the token ids of a text; with add_special_tokens=False without bos.
        context_length: maximum number of tokens of a prompt and its answer.
        lengths: numbers of tokens of the samples, prompt and answer together; None: those of the task.
        data: folder of local files.
        text: the file whose perplexity is measured.
    """

    encode: Callable[..., list[int]]
    context_length: int
    lengths: tuple[int, ...] | None = None
    data: Path | None = None
    text: Path | None = None

    def lengths_for(self, task: str, proposed: Sequence[int], *, least: int) -> list[int]:
        """Returns the lengths asked for, or else the proposed ones that fit the context.

        Raises:
            InputError: a length asked for does not fit, or is less than `least`, or no proposed one fits.
        """
        asked = list(self.lengths or [length for length in proposed if length <= self.context_length])
        if not asked or min(asked) < least or max(asked) > self.context_length:
            got = f", got {', '.join(map(str, asked))}" if self.lengths else ""
            raise InputError(f"the task {task} needs --lengths from {least} to the context of {self.context_length}{got}")
        return asked

    def count(self, text: str) -> int:
        """Returns the number of tokens of a text without special tokens."""
        return len(self.encode(text, add_special_tokens=False))
