"""Captures the queries, keys and values of a model where it answers questions about a long text."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from bench.needle import task
from icejax.models import CausalLM
from icejax.models.decoder import DecoderLayer
from icejax.plan import ladder
from icejax.walk import exact


@dataclass(frozen=True)
class Captured:
    """One layer of one prompt.

    Attributes:
        q: queries f32[Q, N, H] at the answer's positions.
        k, v: keys (after RoPE) and values f32[K, S, H] of all tokens before the answer's first.
        layer: the layer's number.
        guess: the queries by the input of the layer before, as `prefetch` has them; None for the first layer.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    layer: int
    guess: jax.Array | None


def needle_prompt(rng: np.random.Generator, *, length: int, facts: int) -> tuple[list[int], list[int]]:
    """Returns a held-out prompt of `length` bytes that ends in a question, and its answer's bytes."""
    keys = task.Facts(keys=facts)
    context = task.context(rng, length=length - len(task.question("ab")), facts=keys, split="heldout")
    asked = context.questions[rng.integers(facts)]
    return list(context.text + asked.text.encode()), list(asked.answer[: task.DIGITS].encode())


def capture(model: CausalLM, prompt: list[int], answer: list[int]) -> list[Captured]:
    """Returns every full-attention layer's queries at the last prompt token and the answer's, and its keys and values."""
    length, tokens = len(prompt), prompt + answer[:-1]
    padded = np.zeros((1, ladder(len(tokens))), np.int32)
    padded[0, : len(tokens)] = tokens
    x, found = model.model.embed_tokens(jnp.asarray(padded)), []
    asking, before = slice(length - 1, len(tokens)), None
    for i, layer in enumerate(model.model.layers):
        lengths = jnp.asarray([len(tokens)])
        guess = None if before is None else _queries(layer, before, lengths)[0, asking]
        before = x
        x, (q, k, v) = _layer(layer, x, lengths)
        if layer.window is None:
            k, v = (y[0, :length].transpose(1, 0, 2).astype(jnp.float32) for y in (k, v))
            found.append(Captured(q[0, asking].astype(jnp.float32), k, v, i, guess))
    return found


def tiled(layer: Captured, tokens: int, rng: np.random.Generator) -> Captured:
    """Returns the layer with its keys and values repeated up to `tokens`, each copy with noise of half their deviation."""
    copies = []
    for x in (layer.k, layer.v):
        times = -(-tokens // x.shape[1])
        whole = np.tile(np.asarray(x), (1, times, 1))[:, :tokens]
        noise = rng.standard_normal(whole.shape, np.float32) * (0.5 * np.asarray(x).std(1, keepdims=True))
        noise[:, : x.shape[1]] = 0.0  # the first copy is the text itself
        copies.append(jnp.asarray(whole + noise))
    return replace(layer, k=copies[0], v=copies[1])


@jax.jit
def _queries(layer: DecoderLayer, x: jax.Array, lengths: jax.Array) -> jax.Array:
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
    return layer.enter(x, positions, lengths)[0].astype(jnp.float32)


@jax.jit
def _layer(layer: DecoderLayer, x: jax.Array, lengths: jax.Array):
    return exact(layer, x, lengths, lambda q, k, v: (q, k, v))
