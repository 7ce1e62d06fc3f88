"""A layer's experts and its router, over tokens [T, D] or [B, T, D]; the decoder's layers hold them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from icejax.config import Experts, ModelConfig, Routing
from icejax.models.parts.linear import norm_of, normalised
from icejax.ops.experts.mixture import ExpertWeights, mix_experts
from icejax.ops.experts.offloaded_experts import OffloadedExperts
from icejax.ops.quantized.products import product
from icejax.ops.topk import best
from icejax.runtime.mesh import Mesh, hidden_total, once


class Router(nnx.Module):
    """Chooses the experts of each token and the weights of their outputs."""

    def __init__(self, features: int, experts: Experts, *, dtype: str) -> None:
        self.chosen, self.routing = experts.chosen, experts.routing
        self.weight = nnx.Param(jnp.zeros((experts.count, features), dtype))
        if experts.routing.biased:
            self.bias = nnx.Param(jnp.zeros((experts.count,), dtype))
        if experts.routing.per_expert_scale:
            self.per_expert_scale = nnx.Param(jnp.zeros((experts.count,), dtype))
        if experts.routing.choice_bias:  # fp32 in every model: close scores differ by less than bf16 resolves
            self.e_score_correction_bias = nnx.Param(jnp.zeros((experts.count,), "float32"))

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
        """Returns the experts of every token, best first, and their fp32 weights."""
        with jax.named_scope("route"):
            logits, routing = product(x[None], self.weight.get_value())[0], self.routing
            if routing.biased:
                logits = logits + self.bias[...].astype(jnp.float32)[None, :]
            scores = jax.nn.softmax(logits, axis=-1) if routing.score == "softmax" else jax.nn.sigmoid(logits)
            worth = scores + self.e_score_correction_bias[...][None, :] if routing.choice_bias else scores
            ids = best(_in_groups(worth, routing) if routing.groups > 1 else worth, self.chosen)[0]
            weights = jnp.take_along_axis(scores, ids, axis=-1)
            if routing.normalised:
                weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)  # all sigmoids may be zero
            if routing.per_expert_scale:
                weights = weights * self.per_expert_scale[...].astype(jnp.float32)[ids]
            return ids, weights * routing.factor


def _in_groups(worth: jax.Array, routing: Routing) -> jax.Array:
    """Returns `worth` [T, E] with -inf for experts outside the best groups.

    Example: [1, 5, 3, 4] in two groups, one of them chosen: group_best 1 compares 5 with 4 and returns [1, 5, -inf, -inf];
    group_best 2 compares 6 with 7 and returns [-inf, -inf, 3, 4].
    """
    groups = worth.reshape(len(worth), routing.groups, -1)
    top = jnp.take_along_axis(groups, best(groups, routing.group_best)[0], axis=-1)
    allowed = best(top.sum(-1), routing.chosen_groups)[1]
    return jnp.where(allowed[..., None], groups, -jnp.inf).reshape(worth.shape)


class Matrices(nnx.Module):
    """One matrix of every expert, and its bias.

    The weight is dense, quantized (`Grouped`), or either of them in host memory (`OffloadedExperts`).
    """

    def __init__(self, *shape: int, bias: bool, dtype: str) -> None:
        self.weight = nnx.Param(jnp.zeros(shape, dtype))
        self.bias = nnx.Param(jnp.zeros(shape[:2], dtype)) if bias else None


class ExpertStack(nnx.Module):
    """All experts of a layer; a checkpoint holds one tensor per expert and matrix, or one per matrix for all experts."""

    def __init__(self, features: int, experts: Experts, *, dtype: str) -> None:
        self.form = experts.form
        self.summed_over: Mesh | None = None  # as of a `Linear`: each device has a part of every expert's inner channels
        matrices = functools.partial(Matrices, experts.count, bias=self.form.biased, dtype=dtype)
        self.gate_proj, self.up_proj = (matrices(experts.size, features) for _ in range(2))
        self.down_proj = matrices(features, experts.size)

    def __call__(
        self, x: Float[Array, "B T D"], ids: Int[Array, "B*T k"], weights: Float[Array, "B*T k"]
    ) -> Float[Array, "B t D"]:
        """Returns the output of tokens, on a mesh of the device's own, as `hidden_total` does."""
        biases = [part.bias[...] for part in self._parts if self.form.biased]
        biases[2:] = [once(self.summed_over, bias) for bias in biases[2:]]  # of the outputs, which are sums over the devices
        matrices = ExpertWeights(*(part.weight.get_value() for part in self._parts), *biases)
        mixed = mix_experts(x.reshape(-1, x.shape[-1]), matrices, ids, weights, form=self.form)
        return hidden_total(self.summed_over, mixed.reshape(x.shape))

    @property
    def _parts(self) -> tuple[Matrices, ...]:
        return self.gate_proj, self.up_proj, self.down_proj

    @property
    def offloaded(self) -> OffloadedExperts | None:
        """The gate matrices, if the experts are in host memory; else None."""
        experts = self.gate_proj.weight.get_value()
        return experts if isinstance(experts, OffloadedExperts) else None

    @property
    def bytes_from_host(self) -> int:
        """Bytes that a fetch of one expert reads from host memory; 0 if all experts are on the device."""
        return 0 if self.offloaded is None else sum(part.weight.get_value().expert_bytes for part in self._parts)

    def update_resident(self, whole: ExpertStack, taken: Int[Array, " E"]) -> None:
        """Puts the most chosen experts on the device, as many as were there.

        Args:
            whole: the same experts, all on the device.
            taken: how often each expert was chosen.
        """
        for part, full in zip(self._parts, whole._parts, strict=True):
            part.weight.set_value(part.weight.get_value().with_resident(full.weight.get_value(), taken))


class ExpertsBeside(nnx.Module):
    """Experts beside a dense MLP (Gemma 4): their input and both outputs pass norms, and the outputs are added."""

    def __init__(self, config: ModelConfig, experts: Experts, *, dtype: str) -> None:
        features, self.eps = config.hidden_size, config.rms_norm_eps
        self.router, self.scale = Router(features, experts, dtype=dtype), nnx.Param(jnp.zeros((features,), dtype))
        self.experts = ExpertStack(features, experts, dtype=dtype)
        self.mlp_norm, self.pre_norm, self.post_norm = (norm_of(config, features, dtype=dtype) for _ in range(3))

    def __call__(
        self, x: Float[Array, "B T D"], made: Float[Array, "B t D"]
    ) -> tuple[Float[Array, "B t D"], Int[Array, "B T k"]]:
        """Returns the sum of the normalised MLP and expert outputs, and the experts that each token used.

        Args:
            x: all tokens before any norm.
            made: the MLP's output for the device's own tokens.
        """
        tokens = x.reshape(-1, x.shape[-1])
        router_input = normalised(tokens, self.eps).astype(x.dtype) * (self.scale[...] * x.shape[-1] ** -0.5)[None]
        ids, weights = self.router(router_input)
        output = self.experts(self.pre_norm(x), ids, weights)
        return self.mlp_norm(made) + self.post_norm(output), ids.reshape(*x.shape[:2], -1)
