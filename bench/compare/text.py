"""Texts whose exact attention is computed once, so that every policy of `bench.compare` can build its cache from it."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.bases.all_tokens import TokenState
from icejax.cache.policies.full import Full, attend_ring
from icejax.cache.protocol import CachePolicy, Heads, Lengths, View
from icejax.cache.sizes import CacheSpec
from icejax.engine.buckets import bucket
from icejax.engine.layers import run_exact, run_layers
from icejax.engine.plan import Plan
from icejax.engine.prefill import prefill_outcome
from icejax.models.decoder import CausalLM, DecoderLayer
from icejax.ops.attention.dense import Attended
from icejax.ops.slots import by_head, merge_heads

SHORT = 64  # tokens after a text that it has room for: a question and its answer


@dataclass(frozen=True)
class Text:
    """One text in a model, and a few tokens after it.

    Attributes:
        tokens: the tokens of the text and the tokens after it.
        base: number of the text's own tokens; the tokens after it are padded to a multiple of SHORT.
        layers: per layer the text's queries, keys and values, and its attention output; padded on the right.
        behind: the same of the tokens after the text.
        last: the last layer's output for the newest tokens, f32[1, T, D].
        next: the model's greedy next token.
        seconds: time of the exact attention over the text and the tokens after it.
    """

    model: CausalLM
    tokens: list[int]
    base: int
    layers: tuple[tuple[tuple[jax.Array, ...], Attended], ...]
    behind: tuple[tuple[tuple[jax.Array, ...], Attended], ...]
    last: jax.Array
    next: int
    seconds: float

    @classmethod
    def read(cls, model: CausalLM, tokens: Sequence[int]) -> Text:
        """Computes exact attention over a text."""
        started, count = time.perf_counter(), len(tokens)
        padded = np.zeros((1, bucket(count + SHORT)), np.int32)
        padded[0, :count] = tokens
        lengths = jnp.asarray([count], jnp.int32)
        run = lambda layer, x, _: (*exact(layer, x, lengths), None)  # noqa: E731
        outputs, layers = zip(*run_layers(model, model.model.embed_tokens(jnp.asarray(padded)), run), strict=True)
        none = jax.tree.map(lambda x: jnp.zeros((1, SHORT, *x.shape[2:]), x.dtype), layers)
        next_token = int(_next(model, outputs[-1], lengths))
        return cls(model, list(tokens), count, layers, none, outputs[-1], next_token, time.perf_counter() - started)

    def then(self, tokens: Sequence[int]) -> Text:
        """Returns the text with these tokens after it, which replace earlier ones; of more than SHORT no cache can be built."""
        started = time.perf_counter()
        padded = np.zeros((1, max(1, -(-len(tokens) // SHORT)) * SHORT), np.int32)
        padded[0, : len(tokens)] = tokens
        text_length, new_length = (jnp.asarray([n], jnp.int32) for n in (self.base, len(tokens)))
        run = lambda layer, x, place: (*_behind(layer, x, self.layers[place.number][0], text_length, new_length), None)  # noqa: E731
        outputs, behind = zip(*run_layers(self.model, self.model.model.embed_tokens(jnp.asarray(padded)), run), strict=True)
        next_token = int(_next(self.model, outputs[-1], new_length))
        seconds = self.seconds + time.perf_counter() - started
        all_tokens = [*self.tokens[: self.base], *tokens]
        return replace(self, tokens=all_tokens, behind=behind, last=outputs[-1], next=next_token, seconds=seconds)

    def logits(self) -> np.ndarray:
        """Returns the logits after each of the tokens after the text, f32[tokens, vocabulary]."""
        return np.asarray(_logits(self.model, self.last), np.float32)[: len(self.tokens) - self.base]

    def under(self, plan: Plan) -> Iterator[tuple[jax.Array, tuple[Any, jax.Array | None]]]:
        """Yields the cache state and the pages of every layer of a plan, as `keep_layers` takes them."""
        base, new = (jnp.asarray([n], jnp.int32) for n in (self.base, len(self.tokens)))
        shared = None
        layers = zip(self.model.model.layers, self.layers, self.behind, plan.policies, strict=True)
        for i, (layer, text_layer, behind, policy) in enumerate(layers):
            outcome = _kept(layer, text_layer, behind, base, new, shared, policy=policy, spec=plan.spec_of(i))
            shared = outcome.shared or shared
            yield self.last, (outcome.state, outcome.pages)


@jax.jit
def exact(layer: DecoderLayer, x: jax.Array, lengths: jax.Array):
    """Returns a layer's output over texts [B, T, D], and its queries, keys and values with their exact attention."""
    return run_exact(layer, x, lengths, lambda q, k, v, attended: ((q, k, v), attended))


@jax.jit
def _behind(layer: DecoderLayer, x: jax.Array, heads, text_length: jax.Array, new_length: jax.Array):
    positions = text_length[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
    token_heads = Heads(*layer.enter(x, positions, text_length + new_length)[:3], new_length, layer.scoring)
    text_mask = (jnp.arange(heads[1].shape[1])[None, :] < text_length[:, None])[:, :, None, None]
    state = TokenState(*(merge_heads(by_head(jnp.where(text_mask, y, 0))) for y in heads[1:]))
    if layer.config.window is None:
        # The text has room for SHORT tokens of its own.
        state = jax.tree.map(lambda y: jnp.pad(y, [(0, 0), (0, x.shape[1] - SHORT), (0, 0)]), state)
        attended = Full().extend(state, token_heads, View(Lengths.of(text_length))).attended
    else:
        slots = jnp.arange(heads[1].shape[1])[None, :]
        position = jnp.where(slots < text_length[:, None], slots, -1)
        attended = attend_ring(state, token_heads, text_length, position=position, window=layer.config.window)
    return layer.leave(x, attended)[0], ((token_heads.q, token_heads.k, token_heads.v), attended)


@functools.partial(jax.jit, static_argnames=("policy", "spec"))
def _kept(layer: DecoderLayer, text, behind, base: jax.Array, new: jax.Array, shared, *, policy: CachePolicy, spec: CacheSpec):
    def put(old: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(old, y.astype(old.dtype), (0, base[0], *(0,) * (old.ndim - 2)))

    heads, attended = jax.tree.map(put, text, behind)
    return prefill_outcome(layer, Heads(*heads, new, layer.scoring), attended, shared, policy=policy, spec=spec)


@jax.jit
def _logits(model: CausalLM, x: jax.Array) -> jax.Array:
    return model.logits(x)[0]


@jax.jit
def _next(model: CausalLM, x: jax.Array, lengths: jax.Array) -> jax.Array:
    return jnp.argmax(model.logits(jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1))[0, 0])
