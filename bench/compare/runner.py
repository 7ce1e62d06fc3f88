"""A comparison on one model: every text attends once, and every policy reads it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from bench.compare import cells, tuned
from bench.compare.cells import PROTOCOLS, ROOM, Cell, Contender, Protocol, Question
from bench.compare.subject import Subject
from bench.compare.text import Text
from icejax.cache.options import make_policy
from icejax.cache.protocol import CachePolicy
from icejax.models.decoder import CausalLM
from icejax.runtime import devices


class Runner:
    """The texts of a group and the subject of one model and length, each made when it is first needed."""

    def __init__(self, model: CausalLM, length: int, options: dict[tuple[str, str], dict]) -> None:
        self._model, self._length = model, length
        self._texts: dict[tuple[str, int], tuple[Text, list[Question]]] = {}
        self._subject: Subject | None = None
        self._options = options  # of a policy and a budget, those that were searched for
        self._warm = False

    def line(self, cell: Cell, number: int, one: Contender, protocol: Protocol) -> dict:
        """Returns what a policy makes of a text, and which options were searched for."""
        options = self._searched(one)
        if self._subject is None:
            self._subject = self._new(make_policy(one.name, options) if options else one.policy)
        return cells.read(self._subject, *self._text(cell, number), protocol) | dict(options=options)

    def rest(self) -> None:
        """Gives back the subject and all programs: those of some eighty would take more mappings than Linux gives a process."""
        self._subject, self._warm = None, False
        jax.clear_caches()

    def forget(self) -> None:
        """Gives back the memory of all texts."""
        self._texts.clear()

    def _text(self, cell: Cell, number: int) -> tuple[Text, list[Question]]:
        if (cell.task, number) not in self._texts:
            if not self._warm:  # what is compiled is not timed
                cell.read(self._model, number)
                self._warm = True
            self._texts[cell.task, number] = cell.read(self._model, number)
        return self._texts[cell.task, number]

    def _searched(self, one: Contender) -> dict:
        if one.name not in tuned.KNOBS:
            return {}
        if (one.name, one.asked) not in self._options:
            attended = functools.partial(self._attended, one.name)
            self._options[one.name, one.asked] = tuned.search(tuned.KNOBS[one.name], one.tokens, attended)
        return self._options[one.name, one.asked]

    def _attended(self, name: str, options: dict) -> float:
        """Returns what a policy attends to in the mean, about a text of no table."""
        subject = self._new(make_policy(name, options))
        text, questions = self._text(Cell(self._length, tuned.TASK, questions=1), 0)
        return float(np.mean([cells.read(subject, text, questions, each)["attended"] for each in PROTOCOLS]))

    def _new(self, policy: CachePolicy) -> Subject:
        return Subject(self._model, policy, prompt_tokens=self._length + ROOM, new_tokens=ROOM)


def run(
    name: str,
    model: CausalLM,
    each: list[Cell],
    some: dict[int, list[Contender]],
    protocols: list[Protocol],
    path: Path,
    before: dict[tuple, dict],
    done: set[tuple],
) -> Iterator[str]:
    """Adds the lines of a model that a file does not hold yet; yields what each was about, those that were there too.

    A line of a text that was asked other questions, of another number of them, is not one.

    Args:
        before: rows by their keys; what was searched for they have already.
        done: keys of those that need no line.
    """
    there = cells.lines(path)
    for length, contenders in some.items():
        of = [each for each in (*before.values(), *there.values()) if (each["model"], each["length"]) == (name, length)]
        runner = Runner(model, length, {(each["policy"], each["budget"]): each["options"] for each in of if each["options"]})
        groups = ((cell, group) for cell in each if cell.length == length for group in cells.groups(model, cell))
        for cell, some_texts in groups:
            questions = {number: len(cell.draw(number)[1]) for number in some_texts}
            for one in contenders:
                for number, protocol in itertools.product(some_texts, protocols):
                    key = (name, one.name, one.asked, length, cell.task, protocol)
                    if key in done:
                        continue
                    if there.get((*key, number), {}).get("asked") != questions[number]:
                        line = dict(zip(cells.KEY, (*key, number), strict=True)) | dict(tokens=one.tokens)
                        where = dict(device=devices.device_name(), jax=jax.__version__)
                        cells.add(path, line | runner.line(cell, number, one, protocol) | where)
                    yield f"{name}: {one.name}, {cell.task}, {length}"
                runner.rest()
            runner.forget()
