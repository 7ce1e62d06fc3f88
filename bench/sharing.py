"""What a layer loses that does not choose its own pages: ``python -m bench.sharing``.

On the queries, keys and values of a model where it answers questions about long texts, the relative error of the attention
output (mean over heads, queries and prompts) of every layer that packs and selects for itself; that takes partition and pages
of an earlier layer (`reuse`, IceCache's); that keeps its own partition and fetches the pages where the tokens are that the
earlier layer attended to; and that selects by a guess of its queries from the input of the layer before (`prefetch`).
`agreement` is the share of its own pages among those it fetches, where both are of one partition. One JSON line per layer,
choice and budget.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import icejax
from bench import panel
from bench.capture import Captured, capture, needle_prompt
from bench.flags import numbers
from bench.methods import RERANKED, attention, error, exact, form, from_keys_of, index_of, residents, select
from bench.needle.evaluate import SHORTEST
from icejax.api.generate import ASSETS
from icejax.checks.numbers import integer
from icejax.runtime import devices

FORMATION, PAGE = "tree-2048-greedy", icejax.Clustered().page_size


def rows(prompts: list[list[Captured]], *, budget: int) -> Iterator[dict]:
    """Yields a row per layer and choice, over all prompts."""
    for i in range(len(prompts[0])):
        choices = dict(own=(None, "own"))
        if i:
            choices["guess"] = (None, "guess")
        for lead in range(i):
            choices |= {f"of layer {lead}": (lead, "path"), f"of layer {lead}, own partition": (lead, "tokens")}
        for name, (lead, how) in choices.items():
            found = [_one(x[i], None if lead is None else x[lead], how, budget) for x in prompts]
            errors, agreements = (np.concatenate(x) for x in zip(*found, strict=True))
            agreement = None if how == "path" else round(float(agreements.mean()), 4)
            error = round(float(errors.mean()), 4)
            yield dict(layer=prompts[0][i].layer, pages=name, budget=budget, error=error, agreement=agreement)


def _one(layer: Captured, leader: Captured | None, how: str, budget: int) -> tuple[list[float], list[float]]:
    sinks, window = residents(budget)
    size = layer.q.shape[-1]
    fetched = icejax.Clustered(budget=budget).num_fetched(layer.k.shape[1] // PAGE)
    pages = form(layer, FORMATION, PAGE, sinks, window, leader if how == "path" else None)
    index = index_of(pages)
    if leader is not None:
        theirs = form(leader, FORMATION, PAGE, sinks, window)
        their_index = index_of(theirs)
    errors, agreements = [], []
    for step in range(len(layer.q)):
        q = layer.q[step].reshape(1, len(layer.k), -1, size)
        options = dict(fetched=fetched, method=RERANKED)
        own = select(q, pages, index, **options)
        if how == "own":
            found = own
        elif how == "guess":
            found = select(q, pages, index, **options, guess=layer.guess[step].reshape(q.shape))
        else:
            asked = leader.q[step].reshape(1, len(leader.k), -1, size)
            found = select(asked, theirs, their_index, **options)
            path = found.path if how == "path" else (_holding(layer, leader, theirs, asked, found, budget, fetched),)
            found = select(q, pages, index, **options, path=path)
        out, _ = attention(q, layer.k, layer.v, pages, found, from_keys_of(index), budget=budget, tail=True)
        errors.append(float(error(out, exact(q[0], layer.k, layer.v, budget=budget)[0]).mean()))
        same = np.asarray(found.page_ids)[0][:, :, None] == np.asarray(own.page_ids)[0][:, None, :]
        agreements.append(float(same.any(-1).mean()))
    return errors, agreements


def _holding(layer: Captured, leader: Captured, theirs, asked: jax.Array, found, budget: int, fetched: int) -> jax.Array:
    """Returns the pages of the layer's own partition that hold most of the weight of what the leader fetched."""
    sinks, window = residents(budget)
    _, logits = attention(asked, leader.k, leader.v, theirs, found, None, budget=budget, tail=True)
    # Tokens are told by their positions, packed in the place of values.
    positions = jnp.broadcast_to(jnp.arange(layer.k.shape[1], dtype=jnp.float32)[None, :, None], layer.v.shape)
    mine, other = (
        np.asarray(form(Captured(x.q, x.k, positions, x.layer, None), FORMATION, PAGE, sinks, window)[1][0, ..., 0], int)
        for x in (layer, leader)
    )
    weights = np.asarray(jax.nn.softmax(logits, -1).sum(1))
    worth = np.zeros(mine.shape[:2])
    for head, ids in enumerate(np.asarray(found.page_ids)[0]):
        page_of = np.zeros(layer.k.shape[1], int)
        page_of[mine[head]] = np.arange(mine.shape[1])[:, None]
        np.add.at(worth[head], page_of[other[head, ids].ravel()], weights[head] + 1e-6)
    return jax.lax.top_k(jnp.asarray(worth)[None], fetched)[1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sharing", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ASSETS, help="checkpoint folder of byte tokens (default: the bundled one)")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a prompt, at most 16,000 (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--budgets", default="64,256")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    try:
        length = integer("--length", arguments.length, least=SHORTEST, most=16000)
        seed, several = integer("--seed", arguments.seed, least=0), integer("--prompts", arguments.prompts)
        budgets = numbers("--budgets", arguments.budgets, most=length // 2)
        model = panel.load(arguments.model, dtype="float32")
        rng = np.random.default_rng((seed, length))
        prompts = [capture(model, *needle_prompt(rng, length=length, facts=4)) for _ in range(several)]
        where = dict(length=length, device=str(devices.device().device_kind), jax=jax.__version__)
        for budget in budgets:
            for row in rows(prompts, budget=budget):
                print(json.dumps(row | where), flush=True)
    except icejax.InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
