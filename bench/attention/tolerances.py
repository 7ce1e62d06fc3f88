"""The error and cost of a tolerance: rows of ``python -m bench.attention.calibrate --tolerances 0.05,0.01 --look 4``.

The cache `tolerant` runs in a model that reads questions about real text (`bench.texts`) and then their true continuations; all
questions about a text are asked. In every step the estimate that it reports is compared with the true error of its attention,
both means over heads and the layers that are not dense. A JSON line per model, length, budget, tolerance and `look` has the
true error, mean and largest of a step; `within`, the share of steps whose true error is at most the tolerance; `coverage` and
`ratio` as in `calibrate`, `coverage_...` of one task; and `attended`, the tokens that a query head attended to exactly.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from bench import panel, texts
from bench.compare.forced import Asked, Forced
from bench.compare.text import SHORT, Text
from bench.flags import numbers
from icejax.cache.policies.tolerant import Tolerant
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer
from icejax.models.decoder import CausalLM


def rows(arguments: argparse.Namespace) -> Iterator[dict]:
    """Yields a row per model, length, look, tolerance and budget; InputError for invalid options."""
    lengths = numbers("--lengths", arguments.lengths, least=texts.SHORTEST + SHORT)
    prompts = integer("--prompts", arguments.prompts, least=1)
    budgets, looks = numbers("--budgets", arguments.budgets), [None, *({arguments.look} - {None})]
    kinds = itertools.product(budgets, looks, _numbers(arguments.tolerances))
    policies = [Tolerant(budget=budget, look=look, tolerance=tolerance) for budget, look, tolerance in kinds]
    for name, model, tokenizer in panel.readers(arguments.model, panel=arguments.panel, dtype="float32"):
        for length in lengths:
            asked = {task: list(_asked(model, tokenizer, task, length, prompts)) for task in texts.TASKS}
            for policy in policies:
                labels = dict(model=name, length=length) | {x: getattr(policy, x) for x in ("budget", "look", "tolerance")}
                yield labels | _figures(Forced(model, policy, length=length), asked, policy.tolerance)
                jax.clear_caches()  # the programs of many policies need more mappings than Linux allows


def _asked(model: CausalLM, tokenizer: Any, task: texts.Task, length: int, prompts: int) -> Iterator[Asked]:
    for number in range(prompts):
        document = texts.document(tokenizer, task, tokens=length - SHORT, number=number)
        text = Text.read(model, document.tokens)
        yield from (Asked.of(text, question) for question in document.questions)


def _figures(subject: Forced, asked: dict[texts.Task, list[Asked]], tolerance: float) -> dict:
    """Returns how a policy's estimates compare with the true errors in the steps of all questions."""
    by_task = {task: _steps(subject, questions) for task, questions in asked.items()}
    true, estimates, tokens = (np.concatenate(arrays) for arrays in zip(*by_task.values(), strict=True))
    figures = dict(
        error=true.mean(),
        largest=true.max(),
        within=(true <= tolerance).mean(),
        coverage=(estimates >= true).mean(),
        ratio=np.median(estimates / true),
        attended=tokens.mean(),
    )
    figures |= {f"coverage_{task}": (estimates >= true).mean() for task, (true, estimates, _) in by_task.items()}
    return dict(steps=len(true)) | {name: float(f"{value:.3g}") for name, value in figures.items()}


def _steps(subject: Forced, questions: list[Asked]) -> tuple[np.ndarray, ...]:
    """Returns true errors, estimates and exact tokens of the steps of questions, means over heads and layers."""
    measured = [subject.measured(question) for question in questions]
    arrays = zip(*((x.errors.mean(2), x.estimates, x.tokens[..., 0]) for x in measured), strict=True)
    return tuple(np.concatenate([x[:, subject.layers] for x in same]).mean(1) for same in arrays)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--tolerances must be numbers, comma-separated, got {text!r}") from None
