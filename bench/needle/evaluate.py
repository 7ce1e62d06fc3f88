"""Pass keys that a model finds in long texts: ``python -m bench.needle.evaluate --tasks single,hops --lengths 2048,8192``.

Text, names and digits are held out of training; the tasks are in `bench.needle.task`. The output is one JSON line per task and
length, with the exact match of whole answers and its 95% Wilson interval. A text is prefilled once for all its questions; the
tokens of a question and of its answer go through the measured cache one by one. Questions about one text are not independent,
so the interval is a little too narrow where `contexts` is less than `questions`.
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
SHORTEST = 512  # tokens; facts do not fit in a shorter text
EARLY_PROMPT = 64  # tokens before the model's own turn, whose first quarter has the facts


def wilson(hits: int, asked: int) -> tuple[float, float]:
    """Returns the 95% Wilson score interval of a share (Wilson 1927); of 50 in 50 it is 0.929 to 1."""
    z, share = 1.959964, hits / asked
    centre, spread = share + z * z / (2 * asked), z * math.sqrt(share * (1 - share) / asked + z * z / (4 * asked * asked))
    return (centre - spread) / (1 + z * z / asked), (centre + spread) / (1 + z * z / asked)


def evaluate(model, policy: icejax.CachePolicy, name: str, *, length: int, questions: int, seed: int) -> dict:
    """Returns the row of one task and length, over as many texts as the questions need."""
    task_form = task.TASKS[name]
    rng = np.random.default_rng((seed, length, *name.encode()))
    reader = Reader(
        model, policy, prompt_tokens=EARLY_PROMPT if task_form.early else length, new_tokens=length if task_form.early else 512
    )
    hits: list[bool] = []
    contexts = 0
    console = Console(stderr=True)
    for _ in track(
        range(-(-questions // _asked(task_form))), f"{name}, {length}", console=console, disable=not console.is_terminal
    ):
        hits += _answers(reader, task_form, *_context(rng, task_form, length))
        contexts += 1
    hits = hits[:questions]
    low, high = wilson(sum(hits), questions)
    turn_seconds = reader.turn_seconds
    ends = {"first_1000_tps": turn_seconds[:1000], "last_1000_tps": turn_seconds[-1000:]} if turn_seconds else {}
    speeds = {name: round(1 / float(np.median(seconds)), 1) for name, seconds in ends.items()}
    return dict(
        task=name, length=length, questions=questions, contexts=contexts, exact=sum(hits) / questions,
        low=round(low, 4), high=round(high, 4), cache=display_name(policy), budget=policy.budget, seed=seed,
        tpot_s=round(float(np.median(reader.seconds)), 6), device=devices.device_name(),
        dtype=model.dtype, jax=jax.__version__,
    ) | speeds  # fmt: skip


def _asked(form: task.Task) -> int:
    """Returns the number of questions about a context of this form."""
    return {"key": form.facts.keys, "values": form.facts.chains, "hop": form.facts.hops}[form.asked]


def _context(rng: np.random.Generator, form: task.Task, length: int) -> tuple[task.Context, list[int], list[int]]:
    """Returns a context, the tokens of its prompt, and those of the model's own turn, which only `early` has."""
    if not form.early:
        context = task.context(rng, length=length, facts=form.facts, split="heldout")
        return context, list(context.text), []
    nothing = task.draw(rng, task.Facts(), "heldout")
    turn = length - EARLY_PROMPT
    context = task.context(rng, length=turn // 4, facts=form.facts, split="heldout")
    prompt_text, turn_text = (
        task.hide(rng, nothing, length=n, split="heldout", kinds=task.KINDS) for n in (EARLY_PROMPT, turn - turn // 4)
    )
    return context, list(prompt_text), list(context.text + turn_text)


def _answers(reader: Reader, form: task.Task, context: task.Context, prompt: list[int], turn: list[int]) -> list[bool]:
    """Returns whether the answer is right, for every question about a context."""
    reader.read(prompt)
    reader.continue_with(turn)
    hits, earlier_tokens = [], []
    for question in context.asked(form):
        text, answer = list(question.text.encode()), list(question.answer.encode())
        decoded = reader.ask([*earlier_tokens, *text], len(answer))
        hits.append(decoded == answer)
        if form.together:
            earlier_tokens += [*text, *decoded, task.EOS]
    return hits


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
        for model_name, model in panel.models(arguments.model, panel=arguments.panel):
            for name, length in itertools.product(names, lengths):
                row = evaluate(model, policy, name, length=length, **options)
                print(json.dumps(row | dict(cache_options=arguments.cache_option, model=model_name)), flush=True)
    except icejax.InputError as error:
        print(f"bench.needle.evaluate: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
