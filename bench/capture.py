"""Captures the queries, keys and values of a model where it answers questions about a long text."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from bench.needle import task
from icejax.cache.bases.channel_scaling import scaled
from icejax.cache.protocol import Heads
from icejax.engine.buckets import bucket
from icejax.engine.layers import LayerPlace, run_exact, run_layers
from icejax.models.decoder import CausalLM, DecoderLayer
from icejax.ops.pages.channel_scaling import factors_of


@dataclass(frozen=True)
class Captured:
    """One layer of one prompt, with channels of like size, as the clustered cache has them.

    Attributes:
        q: queries f32[Q, N, H] at the answer's positions, and at those before it that were wished for.
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


def capture(
    model: CausalLM, prompt: list[int], answer: list[int], *, last: int = 1, balance: bool = True, uneven: float = 0.0
) -> list[Captured]:
    """Returns every full-attention layer's queries at the `last` prompt tokens and the answer's, and its keys and values.

    Args:
        balance: whether channels of keys and queries are brought to like size, as the clustered cache has them.
        uneven: deviation of the logarithms of factors that channels of keys are multiplied by before, and queries divided.
    """
    length, tokens = len(prompt), prompt + answer[:-1]
    padded = np.zeros((1, bucket(len(tokens))), np.int32)
    padded[0, : len(tokens)] = tokens
    asking, lengths, found = slice(length - last, len(tokens)), jnp.asarray([len(tokens)]), []

    def run(layer: DecoderLayer, x: jax.Array, at: LayerPlace):
        return *_layer(layer, x, at.before, lengths, uneven, jax.random.key(at.number), balance=balance), None

    for i, (_, (q, k, v, guess)) in enumerate(run_layers(model, model.model.embed_tokens(jnp.asarray(padded)), run)):
        if model.config.windows[i] is None:
            k, v = (y[0, :length].transpose(1, 0, 2).astype(jnp.float32) for y in (k, v))
            q, guess = (None if y is None else y[0, asking].astype(jnp.float32) for y in (q, guess))
            found.append(Captured(q, k, v, i, guess))
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


@jax.jit(static_argnames="balance")
def _layer(
    layer: DecoderLayer,
    x: jax.Array,
    before: jax.Array | None,
    lengths: jax.Array,
    uneven: jax.Array,
    key: jax.Array,
    *,
    balance: bool,
):
    """Returns a layer's output, and its queries, keys, values and guess of its queries."""
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
    guess = None if before is None else layer.enter(before, positions, lengths).q

    def keep(q: jax.Array, k: jax.Array, v: jax.Array, _):
        factors = jnp.exp(uneven * jax.random.normal(key, (1, *k.shape[2:])))
        heads = Heads(q, k, v, lengths, layer.scoring)
        if balance:
            made = scaled(heads, factors)
            factors *= factors_of(made.q, made.k, lengths)
        guessed = None if guess is None else scaled(replace(heads, q=guess), factors).q
        heads = scaled(heads, factors)
        return heads.q, heads.k, v, guessed

    return run_exact(layer, x, lengths, keep)
