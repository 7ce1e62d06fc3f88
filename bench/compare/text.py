"""Texts that have attended exactly once, of which every policy then keeps what it will."""

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
from icejax.cache.policies.full import Full
from icejax.cache.protocol import CachePolicy, Heads, Lengths, View
from icejax.cache.sizes import CacheSpec
from icejax.engine.buckets import bucket
from icejax.engine.layers import run_exact, run_layers
from icejax.engine.plan import Plan
from icejax.engine.prefill import kept
from icejax.models.decoder import CausalLM, DecoderLayer
from icejax.ops.attention.dense import Attended
from icejax.ops.slots import by_head, joined

SHORT = 64  # tokens behind a text, at most: a question and its answer


@dataclass(frozen=True)
class Text:
    """One text in a model of full-attention layers, and a few tokens behind it.

    Attributes:
        tokens: all of them.
        base: how many are the text's own; those behind it are filled up to SHORT.
        layers: of every layer the queries, keys and values of the text, and what they attended to; padded on the right.
        behind: the same of the tokens behind it.
        last: the last layer's output for the newest tokens, f32[1, T, D].
        next: the token that the model chooses next.
        seconds: that its attention took, that of the tokens behind it too.
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
        """Runs a text."""
        started, count = time.perf_counter(), len(tokens)
        padded = np.zeros((1, bucket(count + SHORT)), np.int32)
        padded[0, :count] = tokens
        lengths = jnp.asarray([count], jnp.int32)
        run = lambda layer, x, _: (*_exact(layer, x, lengths), None)  # noqa: E731
        outputs, layers = zip(*run_layers(model, model.model.embed_tokens(jnp.asarray(padded)), run), strict=True)
        none = jax.tree.map(lambda x: jnp.zeros((1, SHORT, *x.shape[2:]), x.dtype), layers)
        chosen = int(_next(model, outputs[-1], lengths))
        return cls(model, list(tokens), count, layers, none, outputs[-1], chosen, time.perf_counter() - started)

    def then(self, tokens: Sequence[int]) -> Text:
        """Returns the text itself with a few tokens behind it."""
        started = time.perf_counter()
        padded = np.zeros((1, SHORT), np.int32)
        padded[0, : len(tokens)] = tokens
        seen, new = (jnp.asarray([n], jnp.int32) for n in (self.base, len(tokens)))
        run = lambda layer, x, at: (*_behind(layer, x, self.layers[at.number][0], seen, new), None)  # noqa: E731
        outputs, behind = zip(*run_layers(self.model, self.model.model.embed_tokens(jnp.asarray(padded)), run), strict=True)
        chosen = int(_next(self.model, outputs[-1], new))
        seconds = self.seconds + time.perf_counter() - started
        every = [*self.tokens[: self.base], *tokens]
        return replace(self, tokens=every, behind=behind, last=outputs[-1], next=chosen, seconds=seconds)

    def under(self, plan: Plan) -> Iterator[tuple[jax.Array, tuple[Any, jax.Array | None]]]:
        """Yields what every layer keeps of the text under a plan, as `keep_layers` takes it."""
        base, new = (jnp.asarray([n], jnp.int32) for n in (self.base, len(self.tokens)))
        shared = None
        layers = zip(self.model.model.layers, self.layers, self.behind, plan.policies, strict=True)
        for i, (layer, own, behind, policy) in enumerate(layers):
            outcome = _kept(layer, own, behind, base, new, shared, policy=policy, spec=plan.spec_of(i))
            shared = outcome.shared or shared
            yield self.last, (outcome.state, outcome.pages)


@jax.jit
def _exact(layer: DecoderLayer, x: jax.Array, lengths: jax.Array):
    return run_exact(layer, x, lengths, lambda q, k, v, attended: ((q, k, v), attended))


@jax.jit
def _behind(layer: DecoderLayer, x: jax.Array, heads, seen: jax.Array, new: jax.Array):
    positions = seen[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
    own = Heads(*layer.enter(x, positions, seen + new)[:3], new, layer.scoring)
    there = (jnp.arange(heads[1].shape[1])[None, :] < seen[:, None])[:, :, None, None]
    state = TokenState(*(joined(by_head(jnp.where(there, y, 0))) for y in heads[1:]))
    attended = Full().extend(state, own, View(Lengths.of(seen))).attended
    return layer.leave(x, attended)[0], ((own.q, own.k, own.v), attended)


@functools.partial(jax.jit, static_argnames=("policy", "spec"))
def _kept(layer: DecoderLayer, text, behind, base: jax.Array, new: jax.Array, shared, *, policy: CachePolicy, spec: CacheSpec):
    def put(old: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(old, y.astype(old.dtype), (0, base[0], *(0,) * (old.ndim - 2)))

    heads, attended = jax.tree.map(put, text, behind)
    return kept(layer, Heads(*heads, new, layer.scoring), attended, shared, policy=policy, spec=spec)


@jax.jit
def _next(model: CausalLM, x: jax.Array, lengths: jax.Array) -> jax.Array:
    return jnp.argmax(model.logits(jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1))[0, 0])
