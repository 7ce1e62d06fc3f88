"""How well a decode step can estimate its own error: ``python -m bench.attention.calibrate [--panel]``.

The command compares the true relative error of the clustered cache (whole pages) with estimates from a step's data: digests,
scores, and the keys and values of fetched pages. It captures queries, keys and values where a model answers and where it reads
on. W is the weight of all that is not attended exactly, n the tokens of a page, d the deviation of their scores by its digest:

- `share`: W times the deviation of values inside pages.
- `spread`: assumes that the part of a value that keys do not predict is independent of the scores. It is that part's deviation
  times the root of a sum of squares: how far each token's weight is from its page's mean weight. A page that is not fetched
  adds W^2 (exp(d^2) - 1) / n.
- `width`: assumes that all errors point in one direction. It is the deviation of values times a sum: W d of every page that is
  not fetched, and the roots of those squares of every fetched page.

Each estimate is divided by the norm of the output and scaled by one of three measures and a number. `constant` is the number
alone; `last token` and `last 4 tokens` multiply it by the true error over the estimate at the last tokens of the prompt, mean
over a layer's heads. The number covers the true error of 99% of steps on the first model, first seed and first length; these
rows say `chosen`, all others test it. A step's error is the mean over layers and heads. Every row has the rank correlation of
estimates with true errors, the share of steps whose true error is below the estimate (`coverage`), and the median of estimate
over true error (`ratio`); fields `head_...` are the same for single heads.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

import icejax
from bench import panel, texts
from bench.attention import tolerances
from bench.attention.capture import Captured, capture
from bench.attention.methods import WHOLE, form, residents
from bench.attention.page_attention import attention, error, exact, from_keys_of, index_of, select
from bench.flags import listed, numbers, print_rows
from bench.needle import task
from bench.needle.evaluate import SHORTEST
from icejax.api.generate import ASSETS
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer
from icejax.models.decoder import CausalLM
from icejax.ops.attention.dense import Scoring
from icejax.ops.pages.digests import score
from icejax.ops.pages.key_scatter import along
from icejax.ops.pages.tree_walk import uneven_of
from icejax.ops.topk import mask_of
from icejax.runtime import devices

FORMATION, PAGE = "tree-2048-greedy", icejax.Clustered().page_size
TASKS = ("multikey-4", "hops", "text", *texts.TASKS)  # pass keys are for tokens that are bytes
BY_TOKENS = {True: ("multikey-4", "hops", "text"), False: ("text", *texts.TASKS)}  # by whether tokens are bytes
MEASURES = {"constant": 0, "last token": 1, "last 4 tokens": 4}  # last tokens of the prompt that scale an estimate
LAST = max(MEASURES.values())
ON = 64  # tokens that the model reads after a text; every fourth is a step
ESTIMATES = ("share", "spread", "width")
COVERED = 0.99  # share of steps on which the number is chosen, so that 0.95 of other steps are covered


class Step(NamedTuple):
    """True errors and estimates of the steps of one prompt, at one budget.

    Attributes:
        told: seed, task and length of the prompt, and the budget.
        true: relative errors f32[steps, layers, heads]; the first `LAST` steps are the prompt's last tokens.
        estimates: the estimates by name, of the same shape.
    """

    told: dict
    true: np.ndarray
    estimates: dict[str, np.ndarray]


def prompt(rng: np.random.Generator, tokenizer: Any, *, length: int, name: str) -> tuple[list[int], list[int]]:
    """Returns a held-out prompt of `length` tokens and the tokens after it: an answer, or for `text` its next `ON` tokens."""
    if name in texts.TASKS:
        return texts.prompt(tokenizer, name, length=length, number=int(rng.integers(texts.FAR)))
    kind = task.KINDS[rng.choice(len(task.KINDS), p=task.SHARES)] if name == "text" else None
    if kind is not None and not panel.reads_bytes(tokenizer):
        tokens = texts.excerpt(tokenizer, kind, tokens=length + ON, seed=int(rng.integers(2**31)))
        return tokens[:length], tokens[length:]
    if kind is not None:
        text = task.corpus("heldout", kind)
        first = int(rng.integers(0, len(text) - length - ON))
        return list(text[first : first + length]), list(text[first + length : first + length + ON])
    form = task.TASKS[name]
    context = task.context(rng, length=length - len(task.question("ab")), facts=form.facts, split="heldout")
    questions = context.asked(form)
    question = questions[rng.integers(len(questions))]
    return list(context.text + question.text.encode()), list(question.answer[:-1].encode())


def steps(layers: Sequence[Captured], *, budget: int, every: int, told: dict) -> Step:
    """Returns the true errors and the estimates of a prompt's steps; `every` takes one in so many steps after the prompt."""
    by_layer = [_of_layer(x, budget, every) for x in layers]
    names = by_layer[0][0].keys()
    stacked = {name: np.stack([np.stack([step[name] for step in steps]) for steps in by_layer], axis=1) for name in names}
    return Step(told | dict(budget=budget), stacked.pop("true"), stacked)


def _of_layer(layer: Captured, budget: int, stride: int) -> list[dict[str, np.ndarray]]:
    pages = form(layer, FORMATION, PAGE, *residents(budget))
    index = index_of(pages)
    if len(index.levels) > 1:
        raise InputError(f"estimates are of prompts whose pages are all scored, got {layer.k.shape[1]} tokens: take fewer")
    padding = index.levels[0].count.shape[2] - pages[2].shape[2]
    pages = tuple(jnp.pad(x, [(0, 0), (0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 3)) for x in pages)
    deviations = _deviations(pages, index.fit.matrix)
    grouped = jnp.concatenate([layer.q[:LAST], layer.q[LAST::stride]]).reshape(
        -1, layer.k.shape[0], layer.q.shape[1] // layer.k.shape[0], layer.q.shape[-1]
    )
    return [jax.device_get(_step(q, layer.k, layer.v, pages, index, deviations, budget)) for q in grouped]


@jax.jit
def _deviations(pages, matrix) -> tuple[jax.Array, jax.Array]:
    """Returns two deviations f32[K] inside pages: of the values, and of the part that keys do not predict."""
    k, v, mask = (x[0] for x in pages)
    count = jnp.maximum(mask.sum(-1, dtype=jnp.float32), 1)
    k, v = (jnp.where(mask[..., None], x, 0) for x in (k, v))
    k, v = (jnp.where(mask[..., None], x - (x.sum(2) / count[..., None])[:, :, None], 0) for x in (k, v))
    freedom = (count - 1).sum(-1)
    unpredicted = v - jnp.einsum("kpsh,khv->kpsv", k, matrix[0])
    return tuple(jnp.sqrt(jnp.square(x).sum((1, 2, 3)) / freedom) for x in (v, unpredicted))


@jax.jit(static_argnames="budget")
def _step(q, k, v, pages, index, deviations, budget: int) -> dict[str, jax.Array]:
    """Returns the true errors f32[N] of one query [K, G, H], and the estimates of them."""
    sinks, window = residents(budget)
    digests, scale = index.levels[0], q.shape[-1] ** -0.5
    fetched = icejax.Clustered(budget=budget).num_fetched(digests.count.shape[2])
    selection = select(q[None], pages, index, fetched=fetched, method=WHOLE)
    out, exact_logits = attention(q[None], k, v, pages, selection, from_keys_of(index), budget=budget, tail=True)
    norm = jnp.linalg.norm(out, axis=-1)

    # Weights of all tokens, pages and nodes, as the step knows them.
    ids = selection.page_ids[0]
    keys, mask = (jnp.take_along_axis(x[0], ids.reshape(*ids.shape, *(1,) * (x.ndim - 3)), axis=1) for x in pages[::2])
    near_scores = jnp.concatenate([k[:, :sinks], k[:, k.shape[1] - window :]], axis=1)
    near_scores = jnp.einsum("kgh,ksh->kgs", q, near_scores) * scale
    token_scores = jnp.where(mask[:, None], jnp.einsum("kgh,kmsh->kgms", q, keys) * scale, -jnp.inf)
    fetched_mask = mask_of(selection.path[-1], digests.count.shape[2])[0]
    spans = along(q[None], index.scatter, scoring=Scoring(scale))
    scores = score(q[None], digests, spans, scoring=Scoring(scale))
    scores = scores._replace(weight=jnp.where(fetched_mask[:, None], -jnp.inf, scores.weight))
    page_weights, page_variances = scores.weight[0], scores.wide[0]
    parts = (near_scores, token_scores.reshape(*token_scores.shape[:2], -1), page_weights)
    lse = jax.nn.logsumexp(jnp.concatenate(parts, -1), -1)[..., None]
    unevenness = uneven_of([(scores, digests)], lse[None, ..., 0])[0]
    page_weights = jnp.exp(page_weights - lse)

    inexact_mask = mask & ~(exact_logits[:, 0] > -jnp.inf).reshape(mask.shape)
    token_weights = jnp.where(inexact_mask[:, None], jnp.exp(token_scores - lse[..., None]), 0)
    mean = token_weights.sum(-1, keepdims=True) / jnp.maximum(inexact_mask.sum(-1, dtype=jnp.float32), 1)[:, None, :, None]
    deviation_sums = jnp.where(inexact_mask[:, None], jnp.square(token_weights - mean), 0).sum(-1)

    value_deviation, unpredicted_deviation = (x[:, None] for x in deviations)
    figures = dict(
        true=error(out, exact(q, k, v, budget=budget)[0]),
        share=value_deviation * (page_weights.sum(-1) + token_weights.sum((-1, -2))) / norm,
        spread=unpredicted_deviation * jnp.sqrt(unevenness + deviation_sums.sum(-1)) / norm,
        width=value_deviation * ((page_weights * jnp.sqrt(page_variances)).sum(-1) + jnp.sqrt(deviation_sums).sum(-1)) / norm,
    )
    return {name: x.reshape(-1) for name, x in figures.items()}


def calibrated(step: Step, name: str, by: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the estimates and the true errors of all steps after the prompt, scaled by one of `MEASURES`."""
    estimates, tokens = step.estimates[name], MEASURES[by]
    if tokens:
        prompt_means = [x[LAST - tokens : LAST].mean((0, 2), keepdims=True) for x in (step.true, estimates)]
        estimates = estimates * (prompt_means[0] / np.maximum(prompt_means[1], 1e-9))
    return estimates[LAST:], step.true[LAST:]


def constant(found: Sequence[Step], name: str, by: str) -> float:
    """Returns the factor that puts an estimate above the true error of a share `COVERED` of steps."""
    pairs = (calibrated(step, name, by) for step in found)
    return float(np.quantile(np.concatenate([true.mean((1, 2)) / x.mean((1, 2)) for x, true in pairs]), COVERED))


def row(found: Sequence[Step], name: str, by: str, factor: float) -> dict:
    """Returns the figures of estimates times a `factor` against true errors."""
    figures: dict[str, float] = {}
    heads = [np.concatenate(arrays) * scale for arrays, scale in zip(_pairs(found, name, by), (factor, 1.0), strict=True)]
    for prefix, (estimates, true) in (("", [x.mean((1, 2)) for x in heads]), ("head_", [x.ravel() for x in heads])):
        figures |= {} if prefix else dict(steps=len(true), error=round(float(true.mean()), 4))
        figures[f"{prefix}spearman"] = round(rank_correlation(estimates, true), 3)
        figures[f"{prefix}coverage"] = round(float((estimates >= true).mean()), 3)
        figures[f"{prefix}ratio"] = round(float(np.median(estimates / np.maximum(true, 1e-9))), 2)
    return figures


def _pairs(all_steps: Sequence[Step], name: str, measure: str) -> Iterator[tuple[np.ndarray, ...]]:
    return zip(*(calibrated(step, name, measure) for step in all_steps), strict=True)


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Returns Spearman's rank correlation of numbers that are all different; of (1, 5, 7) and (2, 9, 4) it is 0.5."""
    return float(np.corrcoef(*(values.argsort().argsort() for values in (x, y)))[0, 1])


def measured(model: CausalLM, tokenizer: Any, arguments: argparse.Namespace, console: Console) -> Iterator[Step]:
    """Yields the steps of all prompts at all budgets."""
    lengths, of_tokens = numbers("--lengths", arguments.lengths, least=SHORTEST), BY_TOKENS[panel.reads_bytes(tokenizer)]
    tasks = listed("--tasks", arguments.tasks, of_tokens) if arguments.tasks else of_tokens
    budgets = numbers("--budgets", arguments.budgets, most=min(lengths) // 2)
    prompts, seeds = (integer(f"--{name}", getattr(arguments, name), least=1) for name in ("prompts", "seeds"))
    jobs = list(itertools.product(lengths, range(seeds), tasks))
    for length, seed, name in track(jobs, "capture", console=console, disable=not console.is_terminal):
        rng = np.random.default_rng((seed, length, [*TASKS].index(name)))
        for _ in range(prompts):
            layers = capture(model, *prompt(rng, tokenizer, length=length, name=name), last=LAST)
            for budget in budgets:
                yield steps(
                    layers, budget=budget, every=4 if name == "text" else 1, told=dict(length=length, seed=seed, task=name)
                )


def rows(arguments: argparse.Namespace) -> Iterator[dict]:
    """Yields a row per model, estimate, measure, length, budget and seed; InputError for invalid options."""
    if arguments.look is not None:
        raise InputError("--look needs --tolerances: it is an option of the cache")
    factors: dict[tuple[str, str], float] = {}
    for model_name, model, tokenizer in panel.readers(arguments.model, panel=arguments.panel, dtype="float32"):
        all_steps = list(measured(model, tokenizer, arguments, Console(stderr=True)))
        first_length = all_steps[0].told["length"]
        groups = sorted({(step.told["length"], step.told["budget"], step.told["seed"]) for step in all_steps})
        for measure, name in itertools.product(MEASURES, ESTIMATES):
            first = [step for step in all_steps if step.told["seed"] == 0 and step.told["length"] == first_length]
            chosen_here = (name, measure) not in factors
            factor = factors.setdefault((name, measure), constant(first, name, measure))
            for length, budget, seed in groups:
                group = dict(length=length, budget=budget, seed=seed)
                group_steps = [step for step in all_steps if group.items() <= step.told.items()]
                figures = dict(model=model_name, estimate=name, by=measure, factor=round(factor, 4)) | group
                figures |= dict(chosen=chosen_here and (length, seed) == (first_length, 0)) | row(
                    group_steps, name, measure, factor
                )
                for task_name in dict.fromkeys(step.told["task"] for step in group_steps):
                    task_steps = [step for step in group_steps if step.told["task"] == task_name]
                    figures[f"coverage_{task_name}"] = row(task_steps, name, measure, factor)["coverage"]
                yield figures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.attention.calibrate", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ASSETS, help=panel.ANY)
    parser.add_argument("--panel", action="store_true", help="also the models of bench/needle/panel")
    parser.add_argument(
        "--lengths", default="4096", help="tokens of the prompts, comma-separated, at most 36,000 (default: 4096)"
    )
    parser.add_argument(
        "--tasks", help=f"comma-separated, of {', '.join(BY_TOKENS[True])}, or of {', '.join(BY_TOKENS[False])} (default: all)"
    )
    parser.add_argument("--prompts", type=int, default=2, help="prompts per length, seed and task")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--budgets", default="64,256")
    parser.add_argument("--tolerances", help="run the cache `tolerant` instead (`tolerances.py`): tolerances, comma-separated")
    parser.add_argument("--look", type=int, help="with --tolerances: also with this option of the cache")
    arguments = parser.parse_args(argv)
    environment = dict(device=str(devices.device().device_kind), jax=jax.__version__)
    measure = tolerances.rows if arguments.tolerances else rows
    print_rows(parser, (figures | environment for figures in measure(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
