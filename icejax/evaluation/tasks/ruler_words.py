"""RULER's tasks of variables and of frequent words, as variable_tracking.py, common_words_extraction.py and
freq_words_extraction.py in scripts/data/synthetic of NVIDIA/RULER."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from icejax.checks.errors import InputError
from icejax.evaluation.tasks.ruler_needles import NOISE
from icejax.evaluation.tasks.ruler_prompts import SEED, SHORT, Count, Prompt, Sized

TRACKED = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
TRACKED_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the value "
    "{value}, they are: "
)
HOPS, TRACKED_TOKENS = 4, 30
EXAMPLE_VALUE, EXAMPLE_TOKENS = "12345", 500

COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most "
    "often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
COMMON_WORDS, COMMON_TOKENS = 10, 120

FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared coded "
    "words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
    "frequently appeared words in the above coded text?"
)
FREQUENT_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
LETTERS, FREQUENT_WORDS, FREQUENT_TOKENS = 6, 3, 50


def variables(count: Count, length: int) -> Sized:
    """Returns prompts in which variables get each other's value; an example stands before each."""
    draws, numbers = random.Random(SEED), np.random.RandomState(SEED)

    def name(letters: int) -> str:
        return "".join(draws.choices(string.ascii_uppercase, k=letters))

    def number() -> str:
        return str(numbers.randint(10000, 99999))

    def tracked(size: int, *, example: bool = False) -> Prompt:
        letters = 3 if example else 5
        names = [name(letters) for _ in range(HOPS + 1)]
        while len(set(names)) < HOPS + 1:
            names.append(name(letters))
        value = EXAMPLE_VALUE if example else number()
        chain = [f"VAR {names[0]} = {value}", *(f"VAR {names[i + 1]} = VAR {names[i]} " for i in range(HOPS))]
        lines = [NOISE] * size
        for i, place in enumerate(sorted(draws.sample(range(size), len(chain)))):
            lines.insert(place + i, chain[i])
        context = "\n".join(lines).replace(". \n", ".\n")
        prefix = TRACKED_PREFIX.format(count=HOPS + 1, value=value)
        return Prompt(TRACKED.format(context=context, value=value), prefix, names[: HOPS + 1])

    [shown] = Sized(lambda size, _: tracked(size, example=True), new_tokens=0, step=5).prompts(count, EXAMPLE_TOKENS, 1)
    shown_text = f"{shown.text}{shown.prefix} {' '.join(shown.answers)}\n"

    def make(size: int, _: int) -> Prompt:
        prompt, example = tracked(size), shown_text
        for old in shown.answers:
            example = example.replace(old, name(len(old)))
        return prompt._replace(text=f"{example.replace(EXAMPLE_VALUE, number())}\n{prompt.text}")

    step = 5 if length < SHORT else 10
    return Sized(make, TRACKED_TOKENS, step, measured=tracked, reserved=count(shown_text))


def common_words(words: Callable[[str], list[str]], more_words: Callable[[], list[str]], length: int) -> Sized:
    """Returns prompts of a numbered list, in which ten words stand more often than the others; an example stands before each.

    Args:
        words: the words of a list, "noun", "adjective" or "verb".
        more_words: reads the words that prompts with more words than these are made of.
    """
    draws = random.Random(SEED)
    known = sorted({word for kind in ("noun", "adjective", "verb") for word in words(kind)})
    random.Random(SEED).shuffle(known)
    example, repeats = ((20, 3, 1), (6, 1)) if length < SHORT else ((40, 10, 3), (30, 3))

    def listed(size: int, often: int, seldom: int) -> tuple[str, list[str]]:
        drawn = draws.sample(known if size <= len(known) else more_words(), size)
        common = drawn[:COMMON_WORDS]
        rows = common * often + drawn[COMMON_WORDS:] * seldom
        random.Random(SEED).shuffle(rows)
        return _numbered(rows), common

    def make(size: int, _: int) -> Prompt:
        (shown, shown_answers), (context, answers) = listed(*example), listed(size, *repeats)
        first = f"{COMMON.format(context=shown)}{COMMON_PREFIX} {_numbered(shown_answers)}"
        return Prompt(f"{first}\n{COMMON.format(context=context)}", COMMON_PREFIX, answers)

    return Sized(make, COMMON_TOKENS, step=10, probe=4096, most=lambda tokens, each: int(tokens // each) * 2)


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i + 1}. {word}" for i, word in enumerate(words))


@dataclass(frozen=True)
class FrequentWords:
    """Prompts of coded words that appear as often as a zeta distribution says, by their rank squared."""

    new_tokens: int = FREQUENT_TOKENS

    def prompts(self, count: Count, length: int, samples: int, *, added: int = 0) -> Iterator[Prompt]:
        """Yields prompts that have, with their answers' tokens, at most `length` tokens; `added` as in `Sized.prompts`.

        Raises:
            InputError: no prompt is that short.
        """
        draws, room = random.Random(SEED), length - self.new_tokens
        vocabulary_size, step = room // 50, max(1, room // 32)
        vocabulary, size = self._vocabulary(draws, vocabulary_size), room // LETTERS
        while self._prompt(vocabulary, size).tokens(count) < room:
            size += step
        largest = size - step
        for _ in range(samples):
            vocabulary, size = self._vocabulary(draws, vocabulary_size), largest
            while size > 0 and (prompt := self._prompt(vocabulary, size)).tokens(count) > room - added:
                size -= step
            if size <= 0 or len(prompt.answers) < FREQUENT_WORDS:
                raise InputError(f"a prompt of this task of RULER has more than {length} tokens: ask for a longer one")
            yield prompt

    @staticmethod
    def _vocabulary(draws: random.Random, size: int) -> list[str]:
        words = ["".join(draws.choices(string.ascii_lowercase, k=LETTERS)) for _ in range(size)]
        while len(set(words)) < size:
            words.append("".join(draws.choices(string.ascii_lowercase, k=LETTERS)))
        words = sorted(set(words))
        random.Random(SEED).shuffle(words)
        return ["...", *words[1:]]

    @staticmethod
    def _prompt(vocabulary: list[str], size: int) -> Prompt:
        zeta = math.pi**2 / 6
        ranks = np.arange(1, len(vocabulary) + 1)
        counts = (size * ranks**-2.0 / zeta).astype(int)
        words = [word for word, times in zip(vocabulary, counts, strict=True) for _ in range(times)]
        random.Random(SEED).shuffle(words)
        return Prompt(FREQUENT.format(context=" ".join(words)), FREQUENT_PREFIX, vocabulary[1 : 1 + FREQUENT_WORDS])
