"""RULER's needles in a haystack: sentences that give a word or UUID a number or UUID, among sentences that do not matter.

As scripts/data/synthetic/niah.py of NVIDIA/RULER, except where a sentence of an essay ends: at ".", "!" or "?" before a space,
where RULER asks NLTK's Punkt, whose model is a file of its own.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import random
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from icejax.evaluation.tasks.ruler_prompts import SEED, SHORT, Prompt, Sized

NEW_TOKENS = 128
NEEDLE = "One of the special magic {what} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ASKED = (
    "{some} special magic {what} {are} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {what} afterwards.\n{context}\n"
    "What {are_all} the special magic {what} for {key} mentioned in the provided text?"
)
PREFIX = " The special magic {what} for {key} mentioned in the provided text {are}"
ONE, SEVERAL = dict(some="A", are="is", are_all="is"), dict(some="Some", are="are", are_all="are all")
DEPTHS = list(np.round(np.linspace(0, 100, num=40)).astype(int))  # percent of the sentences before a needle


@dataclass(frozen=True)
class Needles:
    """A task of needles.

    Attributes:
        haystack: "noise", "essay" or "needle".
        keys, values: "words", "numbers" or "uuids".
        needles: number of keys with needles.
        each: number of values of a key.
        asked: number of keys that the question names.
    """

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    needles: int = 1
    each: int = 1
    asked: int = 1


TASKS = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", values="uuids"),
    "niah_multikey_1": Needles("essay", needles=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("essay", each=4),
    "niah_multiquery": Needles("essay", needles=4, asked=4),
}


class Pairs(Sequence[str]):
    """The texts "adjective-noun" of two lists, each once and sorted: millions, of which one is made when it is asked for.

    Texts that begin with the same adjective stand together, as do all texts of adjectives that begin with another and a hyphen.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        self._nouns, self._groups = sorted(set(nouns)), list[list[str]]()
        for start in sorted({f"{adjective}-" for adjective in adjectives}):
            if self._groups and start.startswith(self._groups[-1][0]):
                self._groups[-1].append(start)
            else:
                self._groups.append([start])
        sizes = [len(self._nouns) if len(group) == 1 else len(self._texts(group)) for group in self._groups]
        self._ends = list(itertools.accumulate(sizes))

    def _texts(self, group: list[str]) -> list[str]:
        return sorted({start + noun for start in group for noun in self._nouns})

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> str:
        number = bisect.bisect_right(self._ends, index)
        group, place = self._groups[number], index - (self._ends[number - 1] if number else 0)
        return group[0] + self._nouns[place] if len(group) == 1 else self._texts(group)[place]


def needles(task: Needles, words: Callable[[str], list[str]], essay: Callable[[], str], length: int) -> Sized:
    """Returns the prompts of a task.

    Args:
        words: the words of a list, "noun" or "adjective".
        essay: reads the text of the essays, for a haystack of them.
        length: tokens of a prompt and its answer.
    """
    draws = random.Random(SEED)
    pairs = Pairs(words("adjective"), words("noun")) if task.keys == "words" else ()
    essay_words = re.sub(r"\s+", " ", essay()).split(" ") if task.haystack == "essay" else []

    def drawn(what: str) -> str:
        if what == "numbers":
            return str(draws.randint(10**6, 10**7 - 1))
        return draws.choice(pairs) if what == "words" else str(uuid.UUID(int=draws.getrandbits(128), version=4))

    @functools.lru_cache(maxsize=64)
    def sentences(size: int) -> list[str]:
        repeated = essay_words * -(-size // len(essay_words))
        return re.split(r"(?<=[.!?]) +", " ".join(repeated[:size]).strip())

    def context(size: int, inserted: list[str]) -> str:
        if task.haystack == "essay":
            around, pieces, before = sentences(size), [], 0
            depths = sorted(int(len(around) * (depth / 100)) for depth in draws.sample(DEPTHS, len(inserted)))
            for depth, needle in zip(depths, inserted, strict=True):
                pieces += [" ".join(around[before:depth]), needle]
                before = depth
            return " ".join([*pieces, " ".join(around[before:])])
        noise = [NOISE] * size
        if task.haystack == "needle":
            noise = [NEEDLE.format(what=task.values, key=drawn(task.keys), value=drawn(task.values)) for _ in range(size)]
        for place, needle in zip(sorted(draws.sample(range(size), len(inserted)), reverse=True), inserted, strict=True):
            noise.insert(place, needle)
        return "\n".join(noise)

    def make(size: int, _: int) -> Prompt:
        values: list[tuple[str, list[str]]] = []
        for _ in range(task.needles):
            values.append((drawn(task.keys), [drawn(task.values) for _ in range(task.each)]))
        inserted = [NEEDLE.format(what=task.values, key=key, value=value) for key, several in values for value in several]
        random.Random(SEED).shuffle(inserted)
        text = context(size, inserted)
        asked = [values[i] for i in draws.sample(range(task.needles), task.asked)]
        keys = [key for key, _ in asked]
        single = task.asked * task.each == 1
        form = (ONE if single else SEVERAL) | dict(
            what=task.values[:-1] if single else task.values,
            key=keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}",
        )
        return Prompt(
            ASKED.format(context=text, **form), PREFIX.format(**form), [value for _, several in asked for value in several]
        )

    step = 500 if task.haystack == "essay" else 5 if length < SHORT else 25
    return Sized(make, NEW_TOKENS, step)
