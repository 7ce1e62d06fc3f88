"""The walk over a model's layers; what attends in each of them is its caller's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from icejax.models.decoder import CausalLM, DecoderLayer
from icejax.models.parts.latent_attention import Expanded
from icejax.ops.attention.dense import Attended, causal

Kept = TypeVar("Kept")


@jax.jit
def embed(model: CausalLM, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Returns the first layer's input."""
    return model.model.embed_tokens(tokens)


class LayerPlace(NamedTuple):
    """Where a walk is.

    Attributes:
        number: the layer's.
        before: the input of the layer before; None for the first. Not to be read where a layer's program takes its input.
        shared: what the layers before passed on.
    """

    number: int
    before: jax.Array | None
    shared: Any


def run_layers(
    model: CausalLM,
    x: Float[Array, "B T D"],
    run: Callable[[DecoderLayer, jax.Array, LayerPlace], tuple[jax.Array, Kept, Any]],
) -> Iterator[tuple[Float[Array, "B T D"], Kept]]:
    """Yields the output of every layer and what was kept of it, from the first layer to the last.

    Args:
        x: the first layer's input.
        run: takes a layer, its input and its place; returns its output, what is to be kept, and what is passed on.
    """
    before = shared = None
    for number, layer in enumerate(model.model.layers):
        before, (x, kept, shared) = x, run(layer, x, LayerPlace(number, before, shared))
        yield x, kept


def keep_nothing(q: jax.Array, k: jax.Array, v: jax.Array, attended: Attended) -> None:
    """Keeps nothing."""


def run_exact(
    layer: DecoderLayer,
    x: Float[Array, "B T D"],
    lengths: Int[Array, " B"],
    keep: Callable[[jax.Array, jax.Array, jax.Array, Attended], Kept] = keep_nothing,
) -> tuple[Float[Array, "B T D"], Kept]:
    """Runs a layer over right-padded texts from their beginning, where a token attends to all that the layer lets it see.

    Args:
        lengths: tokens of each row.
        keep: what is made of the queries [B, T, N, H], keys and values [B, T, K, H] that a cache keeps, and of what they (or
            their expanded form, which has the same log-sum-exp) attended to.

    Returns:
        The layer's output, and what `keep` returned.
    """
    return run_exact_with_experts(layer, x, lengths, keep)[:2]


def run_exact_with_experts(
    layer: DecoderLayer,
    x: Float[Array, "B T D"],
    lengths: Int[Array, " B"],
    keep: Callable[[jax.Array, jax.Array, jax.Array, Attended], Kept],
) -> tuple[Float[Array, "B T D"], Kept, Int[Array, "B T k"] | None]:
    """Returns what `exact` does, and which experts each token took; None of a layer without experts."""
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None, :], x.shape[:2])
    *heads, expanded = layer.enter(x, positions, lengths)
    with jax.named_scope("attend"):
        attend = functools.partial(causal, lengths=lengths, window=layer.config.window, scoring=layer.scoring)
        attended = attend(*heads) if expanded is None else _by_groups(attend, expanded)
    kept = keep(*heads, attended)
    x, experts = layer.leave(x, attended, expanded=expanded is not None)
    return x, kept, experts


def _by_groups(attend: Callable[..., Attended], expanded: Expanded) -> Attended:
    """Returns what all expanded heads attend to, of which a group at a time exists."""
    if expanded.groups == 1:
        return attend(*expanded.of(jnp.int32(0)))
    parts = lax.map(lambda group: attend(*expanded.of(group)), jnp.arange(expanded.groups))
    return Attended(*(jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, *x.shape[4:]) for x in parts))
