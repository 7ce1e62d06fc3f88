"""Error of a layer that does not choose its own pages: ``python -m bench.attention.sharing``.

The command captures the queries, keys and values of a model that answers questions about long texts. It prints one JSON line
per layer, choice of pages and budget, with the relative error of the attention output (mean over heads, queries and prompts):

- `own`: the layer packs its own keys into pages and selects by its own queries.
- `guess`: it selects by queries guessed from the input of the layer before (option `prefetch`).
- `of layer N`: it packs as layer N does and fetches the pages that layer N selects (option `reuse`, IceCache's).
- `of layer N, own partition`: it keeps its own pages, and fetches those with most weight of the tokens that layer N fetched.

`agreement` is the share of the fetched pages that the layer itself would fetch; it is None for `of layer N`, whose pages are
others.
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
from bench.attention.capture import Captured, capture, needle_prompt
from bench.attention.methods import RERANKED, form, residents
from bench.attention.page_attention import attention, error, exact, from_keys_of, index_of, select
from bench.flags import numbers
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
        for name, (lead, mode) in choices.items():
            measured = [_one(x[i], None if lead is None else x[lead], mode, budget) for x in prompts]
            errors, agreements = (np.concatenate(x) for x in zip(*measured, strict=True))
            agreement = None if mode == "path" else round(float(agreements.mean()), 4)
            error = round(float(errors.mean()), 4)
            yield dict(layer=prompts[0][i].layer, pages=name, budget=budget, error=error, agreement=agreement)


def _one(layer: Captured, leader: Captured | None, mode: str, budget: int) -> tuple[list[float], list[float]]:
    sinks, window = residents(budget)
    size = layer.q.shape[-1]
    fetched = icejax.Clustered(budget=budget).num_fetched(layer.k.shape[1] // PAGE)
    pages = form(layer, FORMATION, PAGE, sinks, window, leader if mode == "path" else None)
    index = index_of(pages)
    if leader is not None:
        leader_pages = form(leader, FORMATION, PAGE, sinks, window)
        leader_index = index_of(leader_pages)
    errors, agreements = [], []
    for step in range(len(layer.q)):
        q = layer.q[step].reshape(1, len(layer.k), -1, size)
        options = dict(fetched=fetched, method=RERANKED)
        own_selection = select(q, pages, index, **options)
        if mode == "own":
            selection = own_selection
        elif mode == "guess":
            selection = select(q, pages, index, **options, guess=layer.guess[step].reshape(q.shape))
        else:
            leader_q = leader.q[step].reshape(1, len(leader.k), -1, size)
            selection = select(leader_q, leader_pages, leader_index, **options)
            path = (
                selection.path
                if mode == "path"
                else (_holding(layer, leader, leader_pages, leader_q, selection, budget, fetched),)
            )
            selection = select(q, pages, index, **options, path=path)
        output, _ = attention(q, layer.k, layer.v, pages, selection, from_keys_of(index), budget=budget, tail=True)
        errors.append(float(error(output, exact(q[0], layer.k, layer.v, budget=budget)[0]).mean()))
        same_page = np.asarray(selection.page_ids)[0][:, :, None] == np.asarray(own_selection.page_ids)[0][:, None, :]
        agreements.append(float(same_page.any(-1).mean()))
    return errors, agreements


def _holding(
    layer: Captured, leader: Captured, leader_pages, leader_q: jax.Array, selection, budget: int, fetched: int
) -> jax.Array:
    """Returns the layer's own pages int32[1, K, fetched] with most weight of the tokens that the leader fetched."""
    sinks, window = residents(budget)
    _, logits = attention(leader_q, leader.k, leader.v, leader_pages, selection, None, budget=budget, tail=True)
    # Positions, packed instead of values, tell which tokens a page holds.
    positions = jnp.broadcast_to(jnp.arange(layer.k.shape[1], dtype=jnp.float32)[None, :, None], layer.v.shape)
    own_positions, leader_positions = (
        np.asarray(form(Captured(x.q, x.k, positions, x.layer, None), FORMATION, PAGE, sinks, window)[1][0, ..., 0], int)
        for x in (layer, leader)
    )
    weights = np.asarray(jax.nn.softmax(logits, -1).sum(1))
    page_weights = np.zeros(own_positions.shape[:2])
    for head, ids in enumerate(np.asarray(selection.page_ids)[0]):
        page_of = np.zeros(layer.k.shape[1], int)
        page_of[own_positions[head]] = np.arange(own_positions.shape[1])[:, None]
        np.add.at(page_weights[head], page_of[leader_positions[head, ids].ravel()], weights[head] + 1e-6)
    return jax.lax.top_k(jnp.asarray(page_weights)[None], fetched)[1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.attention.sharing", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ASSETS, help="checkpoint folder of byte tokens (default: the bundled one)")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a prompt, at most 16,000 (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--budgets", default="64,256")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    try:
        length = integer("--length", arguments.length, least=SHORTEST, most=16000)
        seed, num_prompts = integer("--seed", arguments.seed, least=0), integer("--prompts", arguments.prompts)
        budgets = numbers("--budgets", arguments.budgets, most=length // 2)
        model = panel.load(arguments.model, dtype="float32")
        rng = np.random.default_rng((seed, length))
        prompts = [capture(model, *needle_prompt(rng, length=length, facts=4)) for _ in range(num_prompts)]
        environment = dict(length=length, device=str(devices.device().device_kind), jax=jax.__version__)
        for budget in budgets:
            for row in rows(prompts, budget=budget):
                print(json.dumps(row | environment), flush=True)
    except icejax.InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
