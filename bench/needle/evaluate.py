"""How many pass keys a model finds in long texts: ``python -m bench.needle.evaluate --lengths 2048,8192 --cache clustered``.

Text, names and digits are those held out of training. One JSON line per length; the figure is exact match of all five
digits, with a 95% Wilson interval.
"""

from __future__ import annotations

import argparse
import json
import math
import sys

import jax
import numpy as np
from rich.console import Console
from rich.progress import track

import icejax
from bench.needle import task
from icejax.command import cache_options, make_policy
from icejax.generation import ASSETS


def wilson(hits: int, asked: int) -> tuple[float, float]:
    """Returns the 95% Wilson score interval of a share."""
    z, share = 1.959964, hits / asked
    centre, spread = share + z * z / (2 * asked), z * math.sqrt(share * (1 - share) / asked + z * z / (4 * asked * asked))
    return (centre - spread) / (1 + z * z / asked), (centre + spread) / (1 + z * z / asked)


def evaluate(
    model, tokenizer, policy: icejax.CachePolicy, *, length: int, facts: int, questions: int, seed: int, batch: int
) -> dict:
    """Returns the row of one length: every question has a text of its own, in batches of `batch`."""
    rng = np.random.default_rng((seed, length, facts))
    prompts, answers = [], []
    for _ in range(questions):
        context = task.context(rng, length=length - len(task.question("ab")), facts=facts, split="heldout")
        name = str(rng.choice(list(context.answers)))
        prompts.append(context.text.decode() + task.question(name))
        answers.append(context.answers[name])
    hits, tpots = 0, []
    console = Console(stderr=True)
    for start in track(range(0, questions, batch), f"{length} tokens", console=console, disable=not console.is_terminal):
        responses = icejax.generate(
            model, tokenizer, prompts[start : start + batch], cache=policy, max_new_tokens=task.ANSWER_LENGTH
        )
        for response, answer in zip(responses, answers[start:], strict=False):
            hits += response.text[: task.DIGITS] == answer
            tpots += [response.tpot_s] if response.tpot_s is not None else []
    low, high = wilson(hits, questions)
    budget = responses[0].budget
    return dict(
        length=length, facts=facts, questions=questions, exact=hits / questions, low=round(low, 4), high=round(high, 4),
        cache=responses[0].cache, budget=budget, tpot_s=float(np.median(tpots[1:] or tpots)) if tpots else None, batch=batch,
        device=responses[0].device, dtype=responses[0].dtype, jax=jax.__version__,
    )  # fmt: skip


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise icejax.InputError(f"--lengths must be numbers with commas, got {text!r}") from None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ASSETS, help="checkpoint folder (default: the bundled one)")
    parser.add_argument("--lengths", default="2048,8192", help="tokens of the prompts, comma-separated")
    parser.add_argument("--facts", type=int, default=1)
    parser.add_argument("--questions", type=int, default=100, help="per length")
    parser.add_argument("--cache", default="full", help="default: %(default)s")
    parser.add_argument("--budget", type=int, help="tokens attended exactly; only for caches with a budget")
    parser.add_argument("--cache-option", action="append", default=[], metavar="KEY=VALUE", help="any option of the cache")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=1)
    arguments = parser.parse_args(argv)
    try:
        budget = None if arguments.cache == "full" else arguments.budget
        policy = make_policy(arguments.cache, cache_options(arguments.cache_option, budget=budget))
        lengths = _lengths(arguments.lengths)
        if arguments.questions < 1 or arguments.facts < 1 or arguments.batch_size < 1:
            raise icejax.InputError("--questions, --facts and --batch-size must be at least 1")
        if min(lengths) < 100 + 20 * arguments.facts:
            raise icejax.InputError(f"{arguments.facts} facts need --lengths of at least {100 + 20 * arguments.facts}")
        model, tokenizer = icejax.load(arguments.model)
        for length in lengths:
            row = evaluate(
                model, tokenizer, policy,
                length=length, facts=arguments.facts, questions=arguments.questions, seed=arguments.seed,
                batch=arguments.batch_size,
            )  # fmt: skip
            print(json.dumps(row), flush=True)
    except icejax.InputError as error:
        print(f"bench.needle.evaluate: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
