"""Texts that have attended exactly once, of which every policy then keeps what it will."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.policies.full import Full, TokenState
from icejax.cache.policy import CachePolicy, Heads, Lengths, View
from icejax.cache.slots import by_head, joined
from icejax.cache.spec import CacheSpec
from icejax.inference import kept
from icejax.models import CausalLM
from icejax.models.decoder import DecoderLayer
from icejax.ops.attention import Attended
from icejax.plan import Plan, ladder
from icejax.walk import exact, walk

SHORT = 32  # tokens that a question or an answer is filled up to


@dataclass(frozen=True)
class Text:
    """One text in a model of full-attention layers.

    Attributes:
        tokens: the text's.
        layers: of every layer the queries, keys and values, and what they attended to; padded on the right.
        last: the last layer's output for the newest tokens, f32[1, T, D].
        next: the token that the model chooses next.
        seconds: that its attention took, for tokens behind another text too.
    """

    model: CausalLM
    tokens: list[int]
    layers: tuple[tuple[tuple[jax.Array, ...], Attended], ...]
    last: jax.Array
    next: int
    seconds: float

    @classmethod
    def read(cls, model: CausalLM, tokens: Sequence[int], *, room: int) -> Text:
        """Runs a text, behind which there is to be room for so many tokens."""
        started = time.perf_counter()
        padded = np.zeros((1, ladder(len(tokens) + room)), np.int32)
        padded[0, : len(tokens)] = tokens
        lengths = jnp.asarray([len(tokens)], jnp.int32)
        run = lambda layer, x, _: (*_exact(layer, x, lengths), None)  # noqa: E731
        outputs, layers = zip(*walk(model, model.model.embed_tokens(jnp.asarray(padded)), run), strict=True)
        x = outputs[-1]
        return cls(model, list(tokens), layers, x, int(_next(model, x, lengths)), time.perf_counter() - started)

    def then(self, tokens: Sequence[int]) -> Text:
        """Returns the text with a few more tokens behind it."""
        started = time.perf_counter()
        padded = np.zeros((1, SHORT), np.int32)
        padded[0, : len(tokens)] = tokens
        seen, new = (jnp.asarray([n], jnp.int32) for n in (len(self.tokens), len(tokens)))
        run = lambda layer, x, at: (*_behind(layer, x, *self.layers[at.number], seen, new), None)  # noqa: E731
        outputs, layers = zip(*walk(self.model, self.model.model.embed_tokens(jnp.asarray(padded)), run), strict=True)
        x = outputs[-1]
        chosen = int(_next(self.model, x, new))
        return Text(self.model, [*self.tokens, *tokens], layers, x, chosen, self.seconds + time.perf_counter() - started)

    def under(self, plan: Plan) -> Iterator[tuple[jax.Array, tuple[Any, jax.Array | None]]]:
        """Yields what every layer keeps of the text under a plan, as `inference.prefill` takes it."""
        new, shared = jnp.asarray([len(self.tokens)], jnp.int32), None
        pairs = zip(self.model.model.layers, self.layers, plan.policies, strict=True)
        for i, (layer, (heads, attended), policy) in enumerate(pairs):
            outcome = _kept(layer, heads, attended, new, shared, policy=policy, spec=plan.spec_of(i))
            shared = outcome.shared or shared
            yield self.last, (outcome.state, outcome.pages)


@jax.jit
def _exact(layer: DecoderLayer, x: jax.Array, lengths: jax.Array):
    return exact(layer, x, lengths, lambda q, k, v, attended: ((q, k, v), attended))


@jax.jit
def _behind(layer: DecoderLayer, x: jax.Array, heads, attended: Attended, seen: jax.Array, new: jax.Array):
    positions = seen[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
    own = Heads(*layer.enter(x, positions, seen + new)[:3], new, layer.scoring)
    there = (jnp.arange(heads[1].shape[1])[None, :] < seen[:, None])[:, :, None, None]
    state = TokenState(*(joined(by_head(jnp.where(there, y, 0))) for y in heads[1:]))
    mine = Full().extend(state, own, View(Lengths.of(seen))).attended

    def put(old: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(old, y.astype(old.dtype), (0, seen[0], *(0,) * (old.ndim - 2)))

    heads = tuple(put(old, y) for old, y in zip(heads, (own.q, own.k, own.v), strict=True))
    return layer.leave(x, mine)[0], (heads, Attended(*(put(old, y) for old, y in zip(attended, mine, strict=True))))


@functools.partial(jax.jit, static_argnames=("policy", "spec"))
def _kept(layer: DecoderLayer, heads, attended: Attended, new: jax.Array, shared, *, policy: CachePolicy, spec: CacheSpec):
    return kept(layer, Heads(*heads, new, layer.scoring), attended, shared, policy=policy, spec=spec)


@jax.jit
def _next(model: CausalLM, x: jax.Array, lengths: jax.Array) -> jax.Array:
    return jnp.argmax(model.logits(jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1))[0, 0])
