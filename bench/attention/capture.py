"""Captures queries, keys and values of a model that answers a question about a long text: for `pages` and others."""

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
    """Queries, keys and values of one layer and one prompt, with channels of like size as in the clustered cache.

    Attributes:
        q: queries f32[Q, N, H] at the last positions of the prompt (`last` in `capture`) and at the answer's.
        k, v: keys (after RoPE) and values f32[K, S, H] of the prompt's tokens.
        layer: the layer's number.
        guess: queries computed from the input of the layer before (option `prefetch`); None for the first layer.
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
    question = context.questions[rng.integers(facts)]
    return list(context.text + question.text.encode()), list(question.answer[: task.DIGITS].encode())


def capture(
    model: CausalLM, prompt: list[int], answer: list[int], *, last: int = 1, balance: bool = True, uneven: float = 0.0
) -> list[Captured]:
    """Returns the captured full-attention layers: queries at the `last` prompt tokens and the answer's, keys and values.

    Args:
        balance: whether to bring channels of keys and queries to like size, as the clustered cache does.
        uneven: deviation of the logarithms of random factors that multiply the keys' channels and divide the queries' first.
    """
    length, tokens = len(prompt), prompt + answer[:-1]
    padded = np.zeros((1, bucket(len(tokens))), np.int32)
    padded[0, : len(tokens)] = tokens
    query_positions, lengths, captured = slice(length - last, len(tokens)), jnp.asarray([len(tokens)]), []

    def run(layer: DecoderLayer, x: jax.Array, place: LayerPlace):
        return *_layer(layer, x, place.before, lengths, uneven, jax.random.key(place.number), balance=balance), None

    for i, (_, (q, k, v, guess)) in enumerate(run_layers(model, model.model.embed_tokens(jnp.asarray(padded)), run)):
        if model.config.windows[i] is None:
            k, v = (y[0, :length].transpose(1, 0, 2).astype(jnp.float32) for y in (k, v))
            q, guess = (None if y is None else y[0, query_positions].astype(jnp.float32) for y in (q, guess))
            captured.append(Captured(q, k, v, i, guess))
    return captured


def tiled(layer: Captured, tokens: int, rng: np.random.Generator) -> Captured:
    """Returns the layer with keys and values repeated up to `tokens`; copies have noise of half their standard deviation."""
    copies = []
    for x in (layer.k, layer.v):
        times = -(-tokens // x.shape[1])
        repeated = np.tile(np.asarray(x), (1, times, 1))[:, :tokens]
        noise = rng.standard_normal(repeated.shape, np.float32) * (0.5 * np.asarray(x).std(1, keepdims=True))
        noise[:, : x.shape[1]] = 0.0  # the first copy is the text itself
        copies.append(jnp.asarray(repeated + noise))
    return replace(layer, k=copies[0], v=copies[1])


@jax.jit(static_argnames="balance")
def _layer(
    layer: DecoderLayer,
    x: jax.Array,
    previous_input: jax.Array | None,
    lengths: jax.Array,
    uneven: jax.Array,
    key: jax.Array,
    *,
    balance: bool,
):
    """Returns a layer's output, and its queries, keys, values and guessed queries (see `Captured`)."""
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
    guess = None if previous_input is None else layer.enter(previous_input, positions, lengths).q

    def keep(q: jax.Array, k: jax.Array, v: jax.Array, _):
        factors = jnp.exp(uneven * jax.random.normal(key, (1, *k.shape[2:])))
        heads = Heads(q, k, v, lengths, layer.scoring)
        if balance:
            scaled_heads = scaled(heads, factors)
            factors *= factors_of(scaled_heads.q, scaled_heads.k, lengths)
        guessed = None if guess is None else scaled(replace(heads, q=guess), factors).q
        heads = scaled(heads, factors)
        return heads.q, heads.k, v, guessed

    return run_exact(layer, x, lengths, keep)
