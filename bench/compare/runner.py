"""Runs a comparison on one model: exact attention once per text, and then every policy reads the text."""

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
    """The texts of a group, and the subject of one model and length; each is made when it is first needed."""

    def __init__(self, model: CausalLM, length: int, options: dict[tuple[str, str], dict]) -> None:
        self._model, self._length = model, length
        self._texts: dict[tuple[str, int], tuple[Text, list[Question]]] = {}
        self._subject: Subject | None = None
        self._options = options  # options found by search, by policy and budget
        self._warm = False

    def line(self, cell: Cell, number: int, contender: Contender, protocol: Protocol) -> dict:
        """Returns a policy's figures on a text, and its options that were found by search."""
        options = self._searched(contender)
        if self._subject is None:
            self._subject = self._new(make_policy(contender.name, options) if options else contender.policy)
        return cells.read(self._subject, *self._text(cell, number), protocol) | dict(options=options)

    def rest(self) -> None:
        """Frees the subject and all programs: those of eighty subjects need more mappings than Linux allows."""
        self._subject, self._warm = None, False
        jax.clear_caches()

    def forget(self) -> None:
        """Frees all texts."""
        self._texts.clear()

    def _text(self, cell: Cell, number: int) -> tuple[Text, list[Question]]:
        if (cell.task, number) not in self._texts:
            if not self._warm:  # compiles first, so the timed read does not
                cell.read(self._model, number)
                self._warm = True
            self._texts[cell.task, number] = cell.read(self._model, number)
        return self._texts[cell.task, number]

    def _searched(self, contender: Contender) -> dict:
        if contender.name not in tuned.KNOBS:
            return {}
        if (contender.name, contender.asked) not in self._options:
            attended = functools.partial(self._attended, contender.name)
            self._options[contender.name, contender.asked] = tuned.search(
                tuned.KNOBS[contender.name], contender.tokens, attended
            )
        return self._options[contender.name, contender.asked]

    def _attended(self, name: str, options: dict) -> float:
        """Returns the mean number of tokens that a policy attends to, on a text that no table uses."""
        subject = self._new(make_policy(name, options))
        text, questions = self._text(Cell(self._length, tuned.TASK, questions=1), 0)
        return float(np.mean([cells.read(subject, text, questions, protocol)["attended"] for protocol in PROTOCOLS]))

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
    """Adds a model's missing lines to a file; yields a description of every line, missing or not.

    An old line with another number of questions counts as missing.

    Args:
        name: the model's name.
        each: all cells.
        some: contenders by length.
        before: old rows by key; their options found by search are used again.
        done: keys of rows that need no lines.
    """
    old_lines = cells.lines(path)
    for length, contenders in some.items():
        rows = [row for row in (*before.values(), *old_lines.values()) if (row["model"], row["length"]) == (name, length)]
        runner = Runner(model, length, {(row["policy"], row["budget"]): row["options"] for row in rows if row["options"]})
        groups = ((cell, group) for cell in each if cell.length == length for group in cells.groups(model, cell))
        for cell, text_numbers in groups:
            questions = {number: len(cell.draw(number)[1]) for number in text_numbers}
            for contender in contenders:
                for number, protocol in itertools.product(text_numbers, protocols):
                    key = (name, contender.name, contender.asked, length, cell.task, protocol)
                    if key in done:
                        continue
                    if old_lines.get((*key, number), {}).get("asked") != questions[number]:
                        line = dict(zip(cells.KEY, (*key, number), strict=True)) | dict(tokens=contender.tokens)
                        environment = dict(device=devices.device_name(), jax=jax.__version__)
                        cells.add(path, line | runner.line(cell, number, contender, protocol) | environment)
                    yield f"{name}: {contender.name}, {cell.task}, {length}"
                runner.rest()
            runner.forget()
