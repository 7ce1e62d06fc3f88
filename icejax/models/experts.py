"""A layer's experts and the router by which tokens choose among them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from icejax.config import Experts
from icejax.ops.attention import EINSUM
from icejax.ops.experts import Stack, mixed
from icejax.ops.topk import best


class Router(nnx.Module):
    """Which experts a token takes, and with what weights."""

    def __init__(self, features: int, experts: Experts, *, dtype: str) -> None:
        self.config = experts
        self.weight = nnx.Param(jnp.zeros((experts.count, features), dtype))

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
        """Returns the experts of every token, best first, and their fp32 weights."""
        with jax.named_scope("route"):
            scores = jax.nn.softmax(EINSUM("td,ed->te", x, self.weight[...]), axis=-1)
            ids = best(scores, self.config.chosen)[0]
            weights = jnp.take_along_axis(scores, ids, axis=-1)
            return ids, weights / weights.sum(-1, keepdims=True) if self.config.normed else weights


class Matrices(nnx.Module):
    """The same matrix of every expert, each as Hugging Face stores it."""

    def __init__(self, *shape: int, dtype: str) -> None:
        self.weight = nnx.Param(jnp.zeros(shape, dtype))


class ExpertStack(nnx.Module):
    """All experts of a layer; a checkpoint holds each matrix of each apart."""

    def __init__(self, features: int, experts: Experts, *, dtype: str) -> None:
        self.gate_proj = Matrices(experts.count, experts.size, features, dtype=dtype)
        self.up_proj = Matrices(experts.count, experts.size, features, dtype=dtype)
        self.down_proj = Matrices(experts.count, features, experts.size, dtype=dtype)

    def __call__(self, x: Float[Array, "T D"], ids: Int[Array, "T k"], weights: Float[Array, "T k"]) -> Float[Array, "T D"]:
        stack = Stack(*(part.weight[...] for part in (self.gate_proj, self.up_proj, self.down_proj)))
        return mixed(x, stack, ids, weights)
