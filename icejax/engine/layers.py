"""The walk over a model's layers, from [B, T, D] to [B, T, D]; the caller says how each layer attends.

Prefill, extend, the decode step, attention maps and benchmarks walk with `run_layers`. `run_exact` is exact attention over a
text from its beginning.
"""

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
from icejax.models.parts.vocabulary import Ends
from icejax.ops.attention.causal import causal
from icejax.ops.attention.dense import Attended
from icejax.runtime.mesh import home, stream_cut, stream_parts

Kept = TypeVar("Kept")


def embed(model: CausalLM, tokens: Int[Array, "B T"]) -> Float[Array, "B t d"]:
    """Returns the tokens' embeddings, the first layer's input, on the devices.

    On a mesh they are [B, T / n, n D], cut by `mesh.stream_cut`, and so is every layer's output.
    """
    # A layer's output, and experts from the host, are committed to the device: so must the first input be.
    return jax.device_put(_embed(model, tokens), home(model.mesh, stream_cut(model.mesh)))


@jax.jit
def _embed(model: CausalLM, tokens: jax.Array) -> jax.Array:
    return model.ends.on_devices(Ends.embed, tokens, result=stream_cut(model.mesh))


class LayerPlace(NamedTuple):
    """The place of a layer in a walk.

    Attributes:
        number: index of the layer, from 0.
        before: input of the previous layer; None in the first layer. Unreadable where that layer's program donated it.
        shared: what earlier layers pass on.
    """

    number: int
    before: jax.Array | None
    shared: Any


def run_layers(
    model: CausalLM,
    x: Float[Array, "B T D"],
    run: Callable[[DecoderLayer, jax.Array, LayerPlace], tuple[jax.Array, Kept, Any]],
) -> Iterator[tuple[Float[Array, "B T D"], Kept]]:
    """Yields, from the first layer to the last, the output of every layer and the second result of `run`.

    Args:
        x: the first layer's input.
        run: takes a layer, its input and its place; returns its output, a result to yield, and what later layers get as
            `shared`.
    """
    before = shared = None
    for number, layer in enumerate(model.model.layers):
        before, (x, result, shared) = x, run(layer, x, LayerPlace(number, before, shared))
        yield x, result


def keep_nothing(q: jax.Array, k: jax.Array, v: jax.Array, attended: Attended) -> None:
    """Keeps nothing."""


def run_exact(
    layer: DecoderLayer,
    x: Float[Array, "B t D"],
    lengths: Int[Array, " B"],
    keep: Callable[[jax.Array, jax.Array, jax.Array, Attended], Kept] = keep_nothing,
) -> tuple[Float[Array, "B t D"], Kept]:
    """Runs a layer over right-padded texts from their beginning, with the exact causal attention of the layer.

    Args:
        x: the layer's input, on a mesh of the device's own tokens.
        lengths: number of tokens of each row.
        keep: called with the queries [B, T, N, H], keys and values [B, T, K, H] in the form that a cache keeps, and the
            attention's result. A latent layer attends in its expanded form, whose log-sum-exp is the same.

    Returns:
        The layer's output, and the result of `keep`.
    """
    return run_exact_with_experts(layer, x, lengths, keep)[:2]


def run_exact_with_experts(
    layer: DecoderLayer,
    x: Float[Array, "B t D"],
    lengths: Int[Array, " B"],
    keep: Callable[[jax.Array, jax.Array, jax.Array, Attended], Kept],
) -> tuple[Float[Array, "B t D"], Kept, Int[Array, "B T k"] | None]:
    """Returns the results of `run_exact` and the ids of each token's experts; None for a layer without experts."""
    tokens = jnp.arange(x.shape[1] * stream_parts(layer.mesh), dtype=jnp.int32)
    positions = jnp.broadcast_to(tokens[None, :], (len(x), len(tokens)))
    *heads, expanded = layer.enter(x, positions, lengths)
    with jax.named_scope("attend"):
        attend = functools.partial(causal, lengths=lengths, window=layer.config.window, scoring=layer.scoring)
        attended = attend(*heads) if expanded is None else _by_groups(attend, expanded)
    result = keep(*heads, attended)
    x, experts = layer.leave(x, attended, expanded=expanded is not None)
    return x, result, experts


def _by_groups(attend: Callable[..., Attended], expanded: Expanded) -> Attended:
    """Returns the attention of all expanded heads; one group of heads exists at a time."""
    if expanded.groups == 1:
        return attend(*expanded.of(jnp.int32(0)))
    parts = lax.map(lambda group: attend(*expanded.of(group)), jnp.arange(expanded.groups))
    return Attended(*(jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, *x.shape[4:]) for x in parts))
