"""What a step can know of its own error: ``python -m bench.calibrate [--panel]``.

On the queries, keys and values of a model where it answers and reads on, the true relative error of the default clustered
cache beside estimates made of what a step has at hand: digests, scores, the keys and values of the pages it fetched. With W
for the weight of what is not attended exactly, n for a page's tokens and d for the deviation of their scores by its digest:

- `share`: W, times the deviation of values inside pages.
- `spread`: as if values that keys do not tell were independent of the scores: their deviation times the root of the summed
  squares of how far each token's weight is from its page's mean, of pages not fetched W^2 (exp(d^2) - 1) / n each.
- `width`: as if they all erred in one direction: the deviation of values times the sum of W d over pages not fetched, and
  of the roots of those squares over pages fetched.

Each is divided by the norm of the output, and told by one of three measures: `constant`, one number for all models; `last
token` and `last 4 tokens`, the true error over the estimate at the last tokens of the prompt, mean over a layer's heads, and
then a number. The number is what covers the true error of 99% of the first seed's steps on the first model at the first length:
these rows say `chosen`, all others test it. A step's error is the mean over layers and heads. Every row has the rank
correlation of estimates with true errors, the share of steps whose true error is below the estimate (`coverage`), and the
median of estimate over true error (`ratio`); the same of single heads as `head_...`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

import icejax
from bench import panel
from bench.capture import Captured, capture
from bench.flags import listed, numbers
from bench.methods import WHOLE, attention, error, exact, form, from_keys_of, index_of, residents, select
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
TASKS = ("multikey-4", "hops", "text")
MEASURES = {"constant": 0, "last token": 1, "last 4 tokens": 4}  # by how many tokens of the prompt an estimate is told
LAST = max(MEASURES.values())
ON = 64  # tokens read on behind a text; every fourth is a step
ESTIMATES = ("share", "spread", "width")
COVERED = 0.99  # of the steps that the number is chosen on, so that 0.95 are covered elsewhere


class Step(NamedTuple):
    """What was measured of the steps of one prompt, at one budget.

    Attributes:
        told: the seed, the task and the length of the prompt, and the budget.
        true: relative errors f32[steps, layers, heads]; the first `LAST` steps are the prompt's last tokens.
        estimates: of each name, of the same shape.
    """

    told: dict
    true: np.ndarray
    estimates: dict[str, np.ndarray]


def prompt(rng: np.random.Generator, *, length: int, name: str) -> tuple[list[int], list[int]]:
    """Returns a held-out prompt of `length` bytes and what stands behind it: an answer, or of `text` how it goes on."""
    if name == "text":
        text = task.corpus("heldout", task.KINDS[rng.choice(len(task.KINDS), p=task.SHARES)])
        first = int(rng.integers(0, len(text) - length - ON))
        return list(text[first : first + length]), list(text[first + length : first + length + ON])
    kind = task.TASKS[name]
    context = task.context(rng, length=length - len(task.question("ab")), facts=kind.facts, split="heldout")
    questions = context.asked(kind)
    asked = questions[rng.integers(len(questions))]
    return list(context.text + asked.text.encode()), list(asked.answer[:-1].encode())


def steps(layers: Sequence[Captured], *, budget: int, every: int, told: dict) -> Step:
    """Returns the true errors of a prompt's steps and their estimates."""
    found = [_of_layer(x, budget, every) for x in layers]
    names = found[0][0].keys()
    whole = {name: np.stack([np.stack([step[name] for step in steps]) for steps in found], axis=1) for name in names}
    return Step(told | dict(budget=budget), whole.pop("true"), whole)


def _of_layer(layer: Captured, budget: int, every: int) -> list[dict[str, np.ndarray]]:
    pages = form(layer, FORMATION, PAGE, *residents(budget))
    index = index_of(pages)
    if len(index.levels) > 1:
        raise InputError(f"estimates are of prompts whose pages are all scored, got {layer.k.shape[1]} tokens: take fewer")
    missing = index.levels[0].count.shape[2] - pages[2].shape[2]
    pages = tuple(jnp.pad(x, [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 3)) for x in pages)
    deviations = _deviations(pages, index.fit.matrix)
    grouped = jnp.concatenate([layer.q[:LAST], layer.q[LAST::every]]).reshape(
        -1, layer.k.shape[0], layer.q.shape[1] // layer.k.shape[0], layer.q.shape[-1]
    )
    return [jax.device_get(_step(q, layer.k, layer.v, pages, index, deviations, budget)) for q in grouped]


@jax.jit
def _deviations(pages, matrix) -> tuple[jax.Array, jax.Array]:
    """Returns the deviations f32[K] of values inside pages, and of what keys do not tell of them."""
    k, v, mask = (x[0] for x in pages)
    count = jnp.maximum(mask.sum(-1, dtype=jnp.float32), 1)
    k, v = (jnp.where(mask[..., None], x, 0) for x in (k, v))
    k, v = (jnp.where(mask[..., None], x - (x.sum(2) / count[..., None])[:, :, None], 0) for x in (k, v))
    freedom = (count - 1).sum(-1)
    untold = v - jnp.einsum("kpsh,khv->kpsv", k, matrix[0])
    return tuple(jnp.sqrt(jnp.square(x).sum((1, 2, 3)) / freedom) for x in (v, untold))


@jax.jit(static_argnames="budget")
def _step(q, k, v, pages, index, deviations, budget: int) -> dict[str, jax.Array]:
    """Returns the true errors f32[N] of one query [K, G, H], and the estimates of them."""
    sinks, window = residents(budget)
    digests, scale = index.levels[0], q.shape[-1] ** -0.5
    fetched = icejax.Clustered(budget=budget).num_fetched(digests.count.shape[2])
    found = select(q[None], pages, index, fetched=fetched, method=WHOLE)
    out, inside = attention(q[None], k, v, pages, found, from_keys_of(index), budget=budget, tail=True)
    norm = jnp.linalg.norm(out, axis=-1)

    # The weights of all there is, as the step has them.
    ids = found.page_ids[0]
    keys, mask = (jnp.take_along_axis(x[0], ids.reshape(*ids.shape, *(1,) * (x.ndim - 3)), axis=1) for x in pages[::2])
    near = jnp.concatenate([k[:, :sinks], k[:, k.shape[1] - window :]], axis=1)
    near = jnp.einsum("kgh,ksh->kgs", q, near) * scale
    tokens = jnp.where(mask[:, None], jnp.einsum("kgh,kmsh->kgms", q, keys) * scale, -jnp.inf)
    taken = mask_of(found.path[-1], digests.count.shape[2])[0]
    lies = along(q[None], index.scatter, scoring=Scoring(scale))
    scores = score(q[None], digests, lies, scoring=Scoring(scale))
    scores = scores._replace(weight=jnp.where(taken[:, None], -jnp.inf, scores.weight))
    left, wide = scores.weight[0], scores.wide[0]
    parts = (near, tokens.reshape(*tokens.shape[:2], -1), left)
    lse = jax.nn.logsumexp(jnp.concatenate(parts, -1), -1)[..., None]
    uneven = uneven_of([(scores, digests)], lse[None, ..., 0])[0]
    left = jnp.exp(left - lse)

    others = mask & ~(inside[:, 0] > -jnp.inf).reshape(mask.shape)
    weights = jnp.where(others[:, None], jnp.exp(tokens - lse[..., None]), 0)
    mean = weights.sum(-1, keepdims=True) / jnp.maximum(others.sum(-1, dtype=jnp.float32), 1)[:, None, :, None]
    apart = jnp.where(others[:, None], jnp.square(weights - mean), 0).sum(-1)

    of_values, untold = (x[:, None] for x in deviations)
    found = dict(
        true=error(out, exact(q, k, v, budget=budget)[0]),
        share=of_values * (left.sum(-1) + weights.sum((-1, -2))) / norm,
        spread=untold * jnp.sqrt(uneven + apart.sum(-1)) / norm,
        width=of_values * ((left * jnp.sqrt(wide)).sum(-1) + jnp.sqrt(apart).sum(-1)) / norm,
    )
    return {name: x.reshape(-1) for name, x in found.items()}


def calibrated(step: Step, name: str, by: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the estimates of all steps behind the prompt and their true errors, as one of `MEASURES` tells them."""
    estimates, tokens = step.estimates[name], MEASURES[by]
    if tokens:
        told = [x[LAST - tokens : LAST].mean((0, 2), keepdims=True) for x in (step.true, estimates)]
        estimates = estimates * (told[0] / np.maximum(told[1], 1e-9))
    return estimates[LAST:], step.true[LAST:]


def constant(found: Sequence[Step], name: str, by: str) -> float:
    """Returns what an estimate is to be multiplied by to be above the true error of the share `COVERED` of steps."""
    pairs = (calibrated(step, name, by) for step in found)
    return float(np.quantile(np.concatenate([true.mean((1, 2)) / x.mean((1, 2)) for x, true in pairs]), COVERED))


def row(found: Sequence[Step], name: str, by: str, factor: float) -> dict:
    """Returns how estimates times a `factor` stand to true errors."""
    told: dict[str, float] = {}
    heads = [np.concatenate(each) * times for each, times in zip(_pairs(found, name, by), (factor, 1.0), strict=True)]
    for of, (estimates, true) in (("", [x.mean((1, 2)) for x in heads]), ("head_", [x.ravel() for x in heads])):
        told |= {} if of else dict(steps=len(true), error=round(float(true.mean()), 4))
        told[f"{of}spearman"] = round(rank_correlation(estimates, true), 3)
        told[f"{of}coverage"] = round(float((estimates >= true).mean()), 3)
        told[f"{of}ratio"] = round(float(np.median(estimates / np.maximum(true, 1e-9))), 2)
    return told


def _pairs(found: Sequence[Step], name: str, by: str) -> Iterator[tuple[np.ndarray, ...]]:
    return zip(*(calibrated(step, name, by) for step in found), strict=True)


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Returns Spearman's, of numbers that are all different."""
    return float(np.corrcoef(*(values.argsort().argsort() for values in (x, y)))[0, 1])


def measured(model: CausalLM, arguments: argparse.Namespace, console: Console) -> Iterator[Step]:
    """Yields the steps of all prompts at all budgets."""
    lengths, tasks = numbers("--lengths", arguments.lengths, least=SHORTEST), listed("--tasks", arguments.tasks, TASKS)
    budgets = numbers("--budgets", arguments.budgets, most=min(lengths) // 2)
    prompts, seeds = (integer(f"--{name}", getattr(arguments, name), least=1) for name in ("prompts", "seeds"))
    jobs = list(itertools.product(lengths, range(seeds), tasks))
    for length, seed, name in track(jobs, "capture", console=console, disable=not console.is_terminal):
        rng = np.random.default_rng((seed, length, [*TASKS].index(name)))
        for _ in range(prompts):
            layers = capture(model, *prompt(rng, length=length, name=name), last=LAST)
            for budget in budgets:
                yield steps(
                    layers, budget=budget, every=4 if name == "text" else 1, told=dict(length=length, seed=seed, task=name)
                )


def rows(arguments: argparse.Namespace) -> Iterator[dict]:
    """Yields a row per model, estimate, measure, length, budget and seed; InputError for options that are not sound."""
    factors: dict[tuple[str, str], float] = {}
    for which, model in panel.models(arguments.model, panel=arguments.panel, dtype="float32"):
        found = list(measured(model, arguments, Console(stderr=True)))
        least = found[0].told["length"]
        groups = sorted({(step.told["length"], step.told["budget"], step.told["seed"]) for step in found})
        for by, name in itertools.product(MEASURES, ESTIMATES):
            first = [step for step in found if step.told["seed"] == 0 and step.told["length"] == least]
            chosen_here = (name, by) not in factors
            factor = factors.setdefault((name, by), constant(first, name, by))
            for length, budget, seed in groups:
                of = dict(length=length, budget=budget, seed=seed)
                some = [step for step in found if of.items() <= step.told.items()]
                told = dict(model=which, estimate=name, by=by, factor=round(factor, 4)) | of
                told |= dict(chosen=chosen_here and (length, seed) == (least, 0)) | row(some, name, by, factor)
                for kind in dict.fromkeys(step.told["task"] for step in some):
                    alone = [step for step in some if step.told["task"] == kind]
                    told[f"coverage_{kind}"] = row(alone, name, by, factor)["coverage"]
                yield told


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.calibrate", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ASSETS, help="checkpoint folder of byte tokens (default: the bundled one)")
    parser.add_argument("--panel", action="store_true", help="also the models of bench/needle/panel")
    parser.add_argument(
        "--lengths", default="4096", help="tokens of the prompts, comma-separated, at most 36,000 (default: 4096)"
    )
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=2, help="prompts per length, seed and task")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--budgets", default="64,256")
    arguments = parser.parse_args(argv)
    where = dict(device=str(devices.device().device_kind), jax=jax.__version__)
    try:
        for found in rows(arguments):
            print(json.dumps(found | where), flush=True)
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
