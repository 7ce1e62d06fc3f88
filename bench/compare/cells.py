"""What `bench.compare` runs: contenders, cells of texts, and the line of every text that a subject has read."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Sequence
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
ROOM = 256  # tokens that a cache has room for after a text: a question and its answer
KEY = ("model", "policy", "budget", "length", "task", "protocol", "text")
COLUMNS = {*KEY, *MEANS, "tokens", "asked", "right", "options", "device", "jax"}  # fields of a line
GROUP_BYTES = 4 * 2**30  # limit of the texts that are in memory together


@dataclass(frozen=True)
class Contender:
    """A policy with a budget.

    Attributes:
        name: its name in tables, with options after colons.
        asked: its budget as given on the command line, a number or a share; `all` for a policy without a budget.
        tokens: the budget in tokens; None for a policy without a budget.
        policy: the policy with its options; a tuned policy (`bench.compare.tuned`) has them before tuning.
    """

    name: str
    asked: str
    tokens: int | None
    policy: CachePolicy


@dataclass(frozen=True)
class Question:
    """The tokens of a question about a text and of its answer, the text with the question, and the text with both."""

    tokens: list[int]
    answer: list[int]
    asked: Text
    answered: Text


@dataclass(frozen=True)
class Cell:
    """Texts of one length and task.

    Attributes:
        questions: number of questions over all texts.
    """

    length: int
    task: str
    questions: int

    @property
    def texts(self) -> int:
        """Number of texts that hold so many questions; 50 questions of multikey-16 need 4 texts."""
        return -(-self.questions // _asked(self.task))

    def draw(self, number: int) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
        """Returns the tokens of a text, and of each of its questions and answers; they are the same for all policies."""
        task_form = task.TASKS[self.task]
        rng = np.random.default_rng((number, self.length, *self.task.encode()))
        context = task.context(rng, length=self.length, facts=task_form.facts, split="heldout")
        pairs = [(list(question.text.encode()), list(question.answer.encode())) for question in context.asked(task_form)]
        return list(context.text), pairs[: self.questions - number * len(pairs)]

    def read(self, model: CausalLM, number: int) -> tuple[Text, list[Question]]:
        """Returns a text and its questions, after exact attention over them."""
        tokens, pairs = self.draw(number)
        text = Text.read(model, tokens)
        return text, [Question(q, a, text.then(q), text.then([*q, *a])) for q, a in pairs]


def _asked(name: str) -> int:
    task_form = task.TASKS[name]
    return {"key": task_form.facts.keys, "values": task_form.facts.chains, "hop": task_form.facts.hops}[task_form.asked]


def contenders(names: Sequence[str], budgets: Sequence[str], length: int) -> tuple[list[Contender], list[str]]:
    """Returns every policy with every budget, and an error line for each budget that a policy refuses.

    Args:
        names: names of policies with options after colons, such as clustered:candidates=1.
    """
    accepted, left_out = [], []
    tokens_by_budget = {budget: _tokens(budget, length) for budget in budgets}
    for name in dict.fromkeys(names):
        policy = policy_from(name)
        if policy.budget is None and name not in KNOBS:
            accepted.append(Contender(name, "all", None, policy))
            continue
        for budget, tokens in tokens_by_budget.items():
            try:
                accepted.append(
                    Contender(name, budget, tokens, policy if policy.budget is None else policy_from(name, tokens, length))
                )
            except InputError as error:
                left_out.append(f"{name}, budget {budget} of {length} tokens: left out: {error}")
    return accepted, left_out


def policy_from(name: str, budget: int | None = None, length: int = 0) -> CachePolicy:
    """Returns the policy of a name with options after colons; these replace options that follow from budget and length."""
    name, *texts = name.split(":")
    options = dict(text.partition("=")[::2] for text in texts)
    if "budget" in options:
        raise InputError(f"--policies must leave the budget to --budgets, got {name}:budget={options['budget']}")
    if budget is None:
        return make_policy(name, options)
    by_length = BY_LENGTH[name](budget, length) if name in BY_LENGTH else {}
    return make_policy(name, by_length | options | dict(budget=budget))


def _tokens(budget: str, length: int) -> int:
    try:
        tokens = int(budget) if not budget.endswith("%") else round(length * float(budget[:-1]) / 100)
    except (ValueError, OverflowError):
        tokens = 0
    if tokens < 1:
        raise InputError(f"--budgets must be numbers of tokens or shares such as 10%, got {budget!r}")
    return tokens


def read(subject: Subject, text: Text, questions: list[Question], protocol: Protocol) -> dict:
    """Returns a subject's right answers to the questions about a text, their costs, and the error of its attention."""
    hits, first_token_s, seconds, moved_bytes, measured = [], [], [], [], []
    if protocol == "sparse":
        subject.take(text)
        measured.append(subject.measure(questions[0].answered))
    for question in questions:
        if protocol == "dense":
            subject.take(question.asked)
            measured.append(subject.measure(question.answered))
            first_tokens, num_steps = [question.asked.next], len(question.answer) - 1
        else:
            first_tokens, num_steps = [], len(question.answer)
        decoded, first_s, steps, bytes_moved = subject.timed(first_tokens or question.tokens, num_steps)
        hits.append(first_tokens + decoded == question.answer)
        first_token_s.append(
            question.asked.seconds + subject.kept_s if first_tokens else text.seconds + subject.kept_s + first_s
        )
        seconds += steps
        moved_bytes.append(bytes_moved)
    errors, layer_errors, tokens = (
        np.concatenate([getattr(x, name) for x in measured]) for name in ("errors", "whole", "tokens")
    )
    return dict(
        asked=len(hits), right=sum(hits), error=float(errors.mean()), error_whole=float(layer_errors.mean()),
        attended=float(tokens[..., 0].mean()), attended_95=float(np.quantile(tokens[..., 0], 0.95)),
        distinct=float(tokens[..., 1].mean()),
        first_token_s=float(np.median(first_token_s)), tpot_s=float(np.median(seconds)),
        moved_bytes=float(np.mean(moved_bytes)),
    ) | subject.sizes()  # fmt: skip


def groups(model: CausalLM, cell: Cell) -> Iterator[list[int]]:
    """Yields the numbers of texts in groups that fit into GROUP_BYTES together, such as [0, 1], [2, 3]."""
    config = model.config
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
    text_bytes = 4 * heads * config.head_dim * config.num_hidden_layers * (cell.length + SHORT) * 3 // 2
    group_size = max(1, GROUP_BYTES // text_bytes)
    for first in range(0, cell.texts, group_size):
        yield list(range(first, min(cell.texts, first + group_size)))


def lines(path: Path, *, key: Sequence[str] = KEY, fields: Collection[str] = COLUMNS) -> dict[tuple, dict]:
    """Returns the lines of a file by `key`, without lines that were cut off or lack a field."""
    by_key = {}
    for text in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, TypeError):
            line = json.loads(text)
            if isinstance(line, dict) and line.keys() >= {*fields}:
                by_key[tuple(line[name] for name in key)] = line
    return by_key


def of_model(known: dict[tuple, dict], name: str, weights: int) -> dict[tuple, dict]:
    """Returns the lines of a model; a line without `weights`, the checksum of a model's weights, counts by its name alone."""
    return {key: line for key, line in known.items() if line["model"] == name and line.get("weights", weights) == weights}


def add(path: Path, line: dict) -> None:
    """Adds a line to a file; first ends a last line that was cut off."""
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n":
            file.write(b"\n")
        file.write(json.dumps(line).encode() + b"\n")
