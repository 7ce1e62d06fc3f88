"""How many pass keys a model finds in long texts: ``python -m bench.needle.evaluate --tasks single,hops --lengths 2048,8192``.

Text, names and digits are those held out of training; the tasks stand in `bench.needle.task`. One JSON line per task and
length; the figure is exact match of whole answers, with a 95% Wilson interval. The text is prefilled once for all its
questions; a question's tokens and its answer's go through the cache under test one by one. Questions of one text share its
chances, so the interval is a little too narrow where `contexts` is less than `questions`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys

import jax
import numpy as np
from rich.console import Console
from rich.progress import track

import icejax
from bench import panel
from bench.flags import listed, numbers
from bench.needle import task
from bench.needle.reader import Reader
from icejax.api.generate import ASSETS
from icejax.cache.options import cache_options, make_policy
from icejax.cache.registry import display_name
from icejax.checks.numbers import integer
from icejax.runtime import devices

QUICK = dict(tasks="single,multikey-4,multivalue-4,hops", lengths="1024,4096", questions=8)
SHORTEST = 512  # tokens of a text, or facts do not fit
EARLY_PROMPT = 64  # tokens before the model's own turn, in the first quarter of which the facts stand


def wilson(hits: int, asked: int) -> tuple[float, float]:
    """Returns the 95% Wilson score interval of a share."""
    z, share = 1.959964, hits / asked
    centre, spread = share + z * z / (2 * asked), z * math.sqrt(share * (1 - share) / asked + z * z / (4 * asked * asked))
    return (centre - spread) / (1 + z * z / asked), (centre + spread) / (1 + z * z / asked)


def evaluate(model, policy: icejax.CachePolicy, name: str, *, length: int, questions: int, seed: int) -> dict:
    """Returns the row of one task and length: texts are drawn until there are as many questions as asked for."""
    form = task.TASKS[name]
    rng = np.random.default_rng((seed, length, *name.encode()))
    reader = Reader(
        model, policy, prompt_tokens=EARLY_PROMPT if form.early else length, new_tokens=length if form.early else 512
    )
    hits: list[bool] = []
    contexts = 0
    console = Console(stderr=True)
    for _ in track(range(-(-questions // _asked(form))), f"{name}, {length}", console=console, disable=not console.is_terminal):
        hits += _answers(reader, form, *_context(rng, form, length))
        contexts += 1
    hits = hits[:questions]
    low, high = wilson(sum(hits), questions)
    growth = reader.turn_seconds
    ends = {"first_1000_tps": growth[:1000], "last_1000_tps": growth[-1000:]} if growth else {}
    speeds = {name: round(1 / float(np.median(seconds)), 1) for name, seconds in ends.items()}
    return dict(
        task=name, length=length, questions=questions, contexts=contexts, exact=sum(hits) / questions,
        low=round(low, 4), high=round(high, 4), cache=display_name(policy), budget=policy.budget, seed=seed,
        tpot_s=round(float(np.median(reader.seconds)), 6), device=devices.device_name(),
        dtype=model.dtype, jax=jax.__version__,
    ) | speeds  # fmt: skip


def _asked(form: task.Task) -> int:
    """Questions a context of this form asks."""
    return {"key": form.facts.keys, "values": form.facts.chains, "hop": form.facts.hops}[form.asked]


def _context(rng: np.random.Generator, form: task.Task, length: int) -> tuple[task.Context, list[int], list[int]]:
    """Returns a context with the tokens of its prompt and of the model's own turn, which is not empty for `early` alone."""
    if not form.early:
        context = task.context(rng, length=length, facts=form.facts, split="heldout")
        return context, list(context.text), []
    nothing = task.draw(rng, task.Facts(), "heldout")
    turn = length - EARLY_PROMPT
    context = task.context(rng, length=turn // 4, facts=form.facts, split="heldout")
    before, after = (
        task.hide(rng, nothing, length=n, split="heldout", kinds=task.KINDS) for n in (EARLY_PROMPT, turn - turn // 4)
    )
    return context, list(before), list(context.text + after)


def _answers(reader: Reader, form: task.Task, context: task.Context, prompt: list[int], turn: list[int]) -> list[bool]:
    """Says of every question of a context whether its answer is right."""
    reader.read(prompt)
    reader.continue_with(turn)
    found, before = [], []
    for question in context.asked(form):
        text, answer = list(question.text.encode()), list(question.answer.encode())
        given = reader.ask([*before, *text], len(answer))
        found.append(given == answer)
        if form.together:
            before += [*text, *given, task.EOS]
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ASSETS, help="checkpoint folder of byte tokens (default: the bundled one)")
    parser.add_argument("--panel", action="store_true", help="also the models of bench/needle/panel")
    parser.add_argument("--tasks", default="single", help=f"comma-separated, of {', '.join(task.TASKS)} (default: %(default)s)")
    parser.add_argument("--lengths", default="2048,8192", help="tokens of the texts, comma-separated (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=100, help="per task and length (default: %(default)s)")
    parser.add_argument("--cache", default="full", help="default: %(default)s")
    parser.add_argument("--budget", type=int, help="tokens attended exactly; only for caches with a budget")
    parser.add_argument("--cache-option", action="append", default=[], metavar="KEY=VALUE", help="any option of the cache")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a glance in a minute: four tasks, 8 questions each")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        parser.set_defaults(**QUICK)
        arguments = parser.parse_args(argv)
    try:
        policy = make_policy(arguments.cache, cache_options(arguments.cache_option, budget=arguments.budget))
        names, lengths = listed("--tasks", arguments.tasks, task.TASKS), numbers("--lengths", arguments.lengths, least=SHORTEST)
        options = dict(questions=integer("--questions", arguments.questions), seed=integer("--seed", arguments.seed, least=0))
        for which, model in panel.models(arguments.model, panel=arguments.panel):
            for name, length in itertools.product(names, lengths):
                row = evaluate(model, policy, name, length=length, **options)
                print(json.dumps(row | dict(cache_options=arguments.cache_option, model=which)), flush=True)
    except icejax.InputError as error:
        print(f"bench.needle.evaluate: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
