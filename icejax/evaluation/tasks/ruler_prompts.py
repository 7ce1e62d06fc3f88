"""What RULER's tasks have in common: prompts of a size, and the largest size that a number of tokens allows.

RULER is Hsieh et al. 2024 (arXiv 2404.06654). Templates, random draws and their order are those of scripts/data/synthetic in
NVIDIA/RULER (Apache-2.0), so a task, a length and a tokenizer give the prompts that its own programs give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from icejax.checks.errors import InputError

SEED = 42
SHORT = 4096  # tokens below which prompts are made of smaller parts
Count = Callable[[str], int]  # tokens of a text without special tokens, as RULER counts


class Prompt(NamedTuple):
    """A prompt, the text that its answer begins with, and the texts that a right answer has."""

    text: str
    prefix: str
    answers: list[str]

    def tokens(self, count: Count) -> int:
        """Returns the number of tokens before the answer."""
        return count(self.text + self.prefix)


@dataclass(frozen=True)
class Sized:
    """Prompts of a task, as large as a length allows. A size counts sentences, words or documents.

    Attributes:
        make: a prompt of a size, for the number of a sample.
        new_tokens: tokens of an answer.
        step: sizes by which a prompt shrinks until it fits; the smallest size too.
        measured: a prompt of a size whose tokens the search for the largest size counts; None: `make` for sample 0.
        reserved: tokens of a prompt that are not measured.
        probe: the size whose tokens tell how large a prompt may become; None: `step`.
        most: the largest size to try, from the length and the tokens per size.
    """

    make: Callable[[int, int], Prompt]
    new_tokens: int
    step: int
    measured: Callable[[int], Prompt] | None = None
    reserved: int = 0
    probe: int | None = None
    most: Callable[[int, float], int] = lambda length, each: int(length / each * 3)

    def prompts(self, count: Count, length: int, samples: int, *, added: int = 0) -> Iterator[Prompt]:
        """Yields prompts that have, with their answers' tokens, at most `length` tokens.

        Args:
            added: tokens that the tokenizer adds to a prompt; RULER chooses the size without them.

        Raises:
            InputError: no prompt is that short.
        """
        size = self._largest(count, length)
        for index in range(samples):
            yield self._fitting(count, length - added, size, index)

    def _largest(self, count: Count, length: int) -> int:
        def tokens(size: int) -> int:
            prompt = self.make(size, 0) if self.measured is None else self.measured(size)
            return prompt.tokens(count)

        probe = self.probe or self.step
        low, high = self.step, max(self.most(length, tokens(probe) / probe), 2 * self.step)
        largest = self.step
        while low <= high:
            middle = (low + high) // 2
            if tokens(middle) + self.reserved + self.new_tokens <= length:
                largest, low = middle, middle + 1
            else:
                high = middle - 1
        return largest

    def _fitting(self, count: Count, length: int, size: int, index: int) -> Prompt:
        while True:
            prompt = self.make(size, index)
            if prompt.tokens(count) + self.new_tokens <= length:
                return prompt
            if size <= self.step:
                raise InputError(f"a prompt of this task of RULER has more than {length} tokens: ask for a longer one")
            size -= self.step
