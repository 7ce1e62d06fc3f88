"""What a comparison runs: subjects, cells, and a line for every text that a subject has read."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from bench.compare.rows import MEANS
from bench.compare.subject import Subject
from bench.compare.text import SHORT, Text
from bench.compare.tuned import BY_LENGTH, KNOBS
from bench.needle import task
from icejax.cache.options import make_policy
from icejax.cache.protocol import CachePolicy
from icejax.checks.errors import InputError
from icejax.models.decoder import CausalLM

Protocol = Literal["dense", "sparse"]
PROTOCOLS: tuple[Protocol, ...] = ("dense", "sparse")
TASKS = tuple(name for name, form in task.TASKS.items() if not (form.together or form.early))
ROOM = 256  # tokens that a cache has room for behind a text: a question and its answer
KEY = ("model", "policy", "budget", "length", "task", "protocol", "text")
COLUMNS = {*KEY, *MEANS, "tokens", "asked", "right", "options", "device", "jax"}  # of a line
GROUP_BYTES = 4 * 2**30  # of texts that wait for the next subject


@dataclass(frozen=True)
class Contender:
    """A policy as a table names it.

    Attributes:
        asked: its budget as it was asked for, a number or a share; `all` for a policy without one.
        tokens: the budget in tokens; None for a policy without one.
        policy: with its options; of one that is tuned (`bench.compare.tuned`) before it is.
    """

    name: str
    asked: str
    tokens: int | None
    policy: CachePolicy


@dataclass(frozen=True)
class Question:
    """A question about a text, its answer, and the text with the question behind it, and with both."""

    tokens: list[int]
    answer: list[int]
    asked: Text
    answered: Text


@dataclass(frozen=True)
class Cell:
    """Texts of one length and task.

    Attributes:
        questions: asked, over all texts.
    """

    length: int
    task: str
    questions: int

    @property
    def texts(self) -> int:
        """Texts that hold so many questions."""
        return -(-self.questions // _asked(self.task))

    def draw(self, number: int) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
        """Returns the tokens of a text, and of each question about it and its answer; the same for all policies."""
        form = task.TASKS[self.task]
        rng = np.random.default_rng((number, self.length, *self.task.encode()))
        context = task.context(rng, length=self.length, facts=form.facts, split="heldout")
        pairs = [(list(each.text.encode()), list(each.answer.encode())) for each in context.asked(form)]
        return list(context.text), pairs[: self.questions - number * len(pairs)]

    def read(self, model: CausalLM, number: int) -> tuple[Text, list[Question]]:
        """Returns a text and its questions, which have attended."""
        tokens, pairs = self.draw(number)
        text = Text.read(model, tokens)
        return text, [Question(q, a, text.then(q), text.then([*q, *a])) for q, a in pairs]


def _asked(name: str) -> int:
    form = task.TASKS[name]
    return {"key": form.facts.keys, "values": form.facts.chains, "hop": form.facts.hops}[form.asked]


def contenders(names: Sequence[str], budgets: Sequence[str], length: int) -> tuple[list[Contender], list[str]]:
    """Returns every policy with every budget, and a line for each that cannot have it.

    Args:
        names: names of policies, options behind colons: clustered:candidates=1.
    """
    able, left_out = [], []
    wanted = {asked: _tokens(asked, length) for asked in budgets}
    for name in dict.fromkeys(names):
        policy = _policy(name)
        if policy.budget is None and name not in KNOBS:
            able.append(Contender(name, "all", None, policy))
            continue
        for asked, tokens in wanted.items():
            try:
                able.append(Contender(name, asked, tokens, policy if policy.budget is None else _policy(name, tokens, length)))
            except InputError as error:
                left_out.append(f"{name}, budget {asked} of {length} tokens: left out: {error}")
    return able, left_out


def _policy(name: str, budget: int | None = None, length: int = 0) -> CachePolicy:
    """Returns the policy of a name with options behind it, which count before what follows from budget and length."""
    name, *texts = name.split(":")
    options = dict(text.partition("=")[::2] for text in texts)
    if "budget" in options:
        raise InputError(f"--policies must leave the budget to --budgets, got {name}:budget={options['budget']}")
    if budget is None:
        return make_policy(name, options)
    own = BY_LENGTH[name](budget, length) if name in BY_LENGTH else {}
    return make_policy(name, own | options | dict(budget=budget))


def _tokens(budget: str, length: int) -> int:
    try:
        tokens = int(budget) if not budget.endswith("%") else round(length * float(budget[:-1]) / 100)
    except (ValueError, OverflowError):
        tokens = 0
    if tokens < 1:
        raise InputError(f"--budgets must be numbers of tokens or shares such as 10%, got {budget!r}")
    return tokens


def read(subject: Subject, text: Text, questions: list[Question], protocol: Protocol) -> dict:
    """Returns what a subject answers to the questions about a text, what it cost, and what it did to the attention."""
    hits, firsts, seconds, moved, measured = [], [], [], [], []
    if protocol == "sparse":
        subject.take(text)
        measured.append(subject.measure(questions[0].answered))
    for each in questions:
        if protocol == "dense":
            subject.take(each.asked)
            measured.append(subject.measure(each.answered))
            given, rest = [each.asked.next], len(each.answer) - 1
        else:
            given, rest = [], len(each.answer)
        told, first, steps, bytes_moved = subject.timed(given or each.tokens, rest)
        hits.append(given + told == each.answer)
        firsts.append(each.asked.seconds + subject.kept_s if given else text.seconds + subject.kept_s + first)
        seconds += steps
        moved.append(bytes_moved)
    errors, whole, tokens = (np.concatenate([getattr(x, name) for x in measured]) for name in ("errors", "whole", "tokens"))
    return dict(
        asked=len(hits), right=sum(hits), error=float(errors.mean()), error_whole=float(whole.mean()),
        attended=float(tokens[..., 0].mean()), attended_95=float(np.quantile(tokens[..., 0], 0.95)),
        distinct=float(tokens[..., 1].mean()),
        first_token_s=float(np.median(firsts)), tpot_s=float(np.median(seconds)),
        moved_bytes=float(np.mean(moved)),
    ) | subject.sizes()  # fmt: skip


def groups(model: CausalLM, cell: Cell) -> Iterator[list[int]]:
    """Yields the numbers of texts that may stand in memory together."""
    config = model.config
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
    each = 4 * heads * config.head_dim * config.num_hidden_layers * (cell.length + SHORT) * 3 // 2
    together = max(1, GROUP_BYTES // each)
    for first in range(0, cell.texts, together):
        yield list(range(first, min(cell.texts, first + together)))


def lines(path: Path) -> dict[tuple, dict]:
    """Returns the lines that a file holds, by what tells them apart; one that was cut off, or is no such line, is none."""
    found = {}
    for text in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, TypeError):
            line = json.loads(text)
            if isinstance(line, dict) and line.keys() >= COLUMNS:
                found[tuple(line[name] for name in KEY)] = line
    return found


def add(path: Path, line: dict) -> None:
    """Adds a line to a file, whose last one may have been cut off."""
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n":
            file.write(b"\n")
        file.write(json.dumps(line).encode() + b"\n")
