"""The decoder of all families: embedding, layers, final norm, logits; the engine runs it layer by layer over x [B, T, D].

Attribute paths and weight layouts are Hugging Face's, so that checkpoints load by name.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from icejax.config import Experts, LayerConfig, ModelConfig
from icejax.models.parts.chunks import by_chunks
from icejax.models.parts.experts import ExpertsBeside, ExpertStack, Router
from icejax.models.parts.latent_attention import Expanded, LatentAttention
from icejax.models.parts.linear import Linear, norm_of, normalised
from icejax.models.parts.vocabulary import Embedding, Ends
from icejax.models.sharding import spread
from icejax.ops.activations import ACTIVATIONS
from icejax.ops.attention.dense import Attended, Scoring
from icejax.ops.experts.offloaded_experts import OffloadedExperts
from icejax.ops.rope import cos_sin, deinterleave, rerotate, rotate, scale_queries
from icejax.runtime.mesh import Mesh, every_token, own_tokens, rounded_up


def _identity(x: jax.Array) -> jax.Array:
    return x


class Attention(nnx.Module):
    """Projections, head norms and RoPE of a layer; the engine attends between `project` and `output`."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, *, dtype: str) -> None:
        self.config, self.layer, self.rope = config, layer, layer.rope
        heads, kv_heads, size = config.num_attention_heads, layer.kv_heads, layer.head_dim
        project = functools.partial(Linear, config.hidden_size, bias=config.qkv_bias, dtype=dtype)
        self.q_proj, self.k_proj = project(heads * size), project(kv_heads * size)
        if not layer.values_from_keys:
            self.v_proj = project(kv_heads * size)
        self.o_proj = Linear(heads * size, config.hidden_size, bias=config.o_bias, dtype=dtype)
        if config.qk_norm:
            norm_sizes = (size, size) if config.qk_norm == "head" else (heads * size, kv_heads * size)
            self.q_norm, self.k_norm = (norm_of(config, n, dtype=dtype) for n in norm_sizes)
        if layer.sinks:
            self.sinks = nnx.Param(jnp.zeros((heads,), dtype))

    def project(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], seen: Int[Array, " B"]):
        """Returns the queries [B, T, N, H], keys and values [B, T, K, H] of tokens at `positions`.

        `seen` counts the tokens of each row, these included.
        """
        size = self.layer.head_dim
        with jax.named_scope("qkv"):
            q, k = self.q_proj(x), self.k_proj(x)
            v = k if self.layer.values_from_keys else self.v_proj(x)
            if self.config.qk_norm == "all":
                q, k = self.q_norm(q), self.k_norm(k)
            q, k, v = (y.reshape(*x.shape[:2], -1, size) for y in (q, k, v))
            if self.config.qk_norm == "head":
                q, k = self.q_norm(q), self.k_norm(k)
            if self.config.v_norm:
                v = normalised(v, self.config.rms_norm_eps).astype(v.dtype)
        with jax.named_scope("rope"):
            cos, sin = cos_sin(positions, seen, rope=self.rope)
            if self.config.rope_interleave:
                q, k = (deinterleave(y, self.rope.size) for y in (q, k))
            return scale_queries(rotate(q, cos, sin), positions, rope=self.rope), rotate(k, cos, sin), v

    def heads(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the fields of `LayerHeads`: what `project` returns."""
        return q, k, v

    def with_sinks(self, attended: Attended) -> Float[Array, "B T N H"]:
        """Returns the attention output with a sink: each head has one more score in its softmax, without a value (gpt-oss)."""
        share = jax.nn.sigmoid(attended.lse - self.sinks[...].astype(jnp.float32)[None, None])
        return attended.out.astype(jnp.float32) * share[..., None]

    def rerotate(
        self, heads: Float[Array, "#B T N H"], by: Int[Array, "#B T"], seen: Int[Array, " #B"]
    ) -> Float[Array, "#B T N H"]:
        """Returns heads after RoPE as if their tokens stood `by` positions later; `seen` counts the tokens of each row."""
        return rerotate(heads, by, seen, rope=self.rope)

    def output(self, heads: Float[Array, "B T N H"], *, expanded: bool = False) -> Float[Array, "B t D"]:
        """Returns the attention block's output from its heads; `expanded` matters to latent attention only."""
        del expanded
        return self.o_proj(heads.reshape(*heads.shape[:2], -1))


class MLP(nnx.Module):
    """The gated MLP (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, inner: int, *, dtype: str) -> None:
        hidden, bias = config.hidden_size, config.mlp_bias
        self.act = config.hidden_act
        self.gate_proj, self.up_proj = (Linear(hidden, inner, bias=bias, dtype=dtype) for _ in range(2))
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B t D"]:
        return self.down_proj(ACTIVATIONS[self.act](self.gate_proj(x)) * self.up_proj(x))


class SparseMLP(nnx.Module):
    """A mixture of experts, of which each token uses a few (arXiv 1701.06538), and the shared expert."""

    def __init__(self, config: ModelConfig, experts: Experts, *, dtype: str) -> None:
        self.gate = Router(config.hidden_size, experts, dtype=dtype)
        self.experts = ExpertStack(config.hidden_size, experts, dtype=dtype)
        self.config = experts
        if experts.shared:
            self.shared_expert = MLP(config, experts.shared, dtype=dtype)
        if experts.shared_gated:
            self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False, dtype=dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B t D"], Int[Array, "B T k"]]:
        """Returns the output of tokens, on a mesh of the device's own as `hidden_total` does, and the experts of each token."""
        ids, weights = self.gate(x.reshape(-1, x.shape[-1]))
        out, ids = self.experts(x, ids, weights), ids.reshape(*x.shape[:2], -1)
        if not self.config.shared:
            return out, ids
        shared = self.shared_expert(x)
        if self.config.shared_gated:
            shared = jax.nn.sigmoid(own_tokens(self.shared_expert_gate(x), out.shape[1])) * shared
        return out + shared, ids


class LayerHeads(NamedTuple):
    """The queries, keys and values of tokens, after RoPE and before the products are scaled.

    Attributes:
        q, k, v: heads for decoding; k and v are cached.
        expanded: heads for prefill, if they differ: latent attention caches one latent for all heads and expands it into
            keys and values for many queries. None: prefill uses q, k, v. XLA drops whichever heads a program does not use.
    """

    q: jax.Array  # dtype[B, T, N, H]
    k: jax.Array  # dtype[B, T, K, H]
    v: jax.Array  # dtype[B, T, K, Hv]
    expanded: Expanded | None = None


class DecoderLayer(nnx.Module):
    """One layer in two halves: `enter` returns q, k, v, the caller attends, `leave` returns the layer's output.

    Attributes:
        config, mesh: attention and MLP of the layer; the devices that share its heads, as in `CausalLM`.
    """

    def __init__(self, config: ModelConfig, layer: LayerConfig, *, dtype: str) -> None:
        self.config, self.mesh = layer, None
        self.self_attn = (Attention if config.latent is None else LatentAttention)(config, layer, dtype=dtype)
        if layer.experts is not None and layer.experts.beside:
            self.beside = ExpertsBeside(config, layer.experts, dtype=dtype)
        if layer.experts is None or layer.experts.beside:
            self.mlp = MLP(config, config.intermediate_size, dtype=dtype)
        else:
            self.mlp = SparseMLP(config, layer.experts, dtype=dtype)
        norm = functools.partial(norm_of, config, config.hidden_size, dtype=dtype)
        before, after = config.norm_places != "after", config.norm_places != "before"
        self.input_layernorm, self.post_attention_layernorm = (norm() if before else _identity for _ in range(2))
        self.post_self_attn_layernorm, self.post_mlp_layernorm = (norm() if after else _identity for _ in range(2))
        self.scaled = config.layer_scalar
        if self.scaled:
            self.layer_scalar = nnx.Param(jnp.zeros((1,), dtype))

    @property
    def scoring(self) -> Scoring:
        """The scale and the soft cap of this layer's scores."""
        return Scoring(self.config.scale, self.config.softcap)

    def enter(self, x: Float[Array, "B t D"], positions: Int[Array, "B T"], seen: Int[Array, " B"]) -> LayerHeads:
        """Returns the queries, keys (both after RoPE) and values of the tokens at `positions`.

        `seen` counts the tokens of each row, these included. `x` has all tokens, or a device's own (`mesh.stream_parts`).
        """

        def project(positions: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
            return self.self_attn.project(every_token(self.input_layernorm(x), positions.shape[1]), positions, seen)

        gathers = x.shape[1] != positions.shape[1]  # whose tokens exist for one chunk at a time
        return LayerHeads(*self.self_attn.heads(*(by_chunks(project, positions, x) if gathers else project(positions, x))))

    def rerotate(
        self, heads: Float[Array, "#B T N H"], by: Int[Array, "#B T"], seen: Int[Array, " #B"]
    ) -> Float[Array, "#B T N H"]:
        """Returns heads after RoPE as if their tokens stood `by` positions later; `seen` counts the tokens of each row."""
        return self.self_attn.rerotate(heads, by, seen)

    def project(self, heads: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """Returns the attention block's output from its heads."""
        return self.self_attn.output(heads)

    @property
    def experts(self) -> ExpertStack | None:
        """The experts of the layer; None: one MLP for all tokens."""
        if self.config.experts is None:
            return None
        return (self.beside if self.config.experts.beside else self.mlp).experts

    @property
    def offloaded(self) -> OffloadedExperts | None:
        """The experts in host memory; None: all are on the device, or the layer has none."""
        return None if self.experts is None else self.experts.offloaded

    def leave(
        self, x: Float[Array, "B t D"], attended: Attended, *, expanded: bool = False
    ) -> tuple[Float[Array, "B t D"], Int[Array, "B T k"] | None]:
        """Returns the layer's output from its input and its attention output, and the experts of each token (None without).

        `x` has all tokens, or a device's own, as in `enter`. `expanded` says that the attention output is that of the expanded
        heads.
        """

        def run(heads: jax.Array, lse: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
            if self.config.sinks:
                heads = self.self_attn.with_sinks(Attended(heads, lse))
            x = x + self.post_self_attn_layernorm(self.self_attn.output(heads.astype(x.dtype), expanded=expanded))
            with jax.named_scope("mlp"):
                return self._mlp(x, heads.shape[1])

        return by_chunks(run, *attended, x)

    def _mlp(self, x: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array | None]:
        out, expert_ids = self.mlp(every_token(self.post_attention_layernorm(x), tokens)), None
        if isinstance(self.mlp, SparseMLP):
            out, expert_ids = out
        elif self.config.experts is not None:
            out, expert_ids = self.beside(every_token(x, tokens), out)
        out = x + self.post_mlp_layernorm(out)
        return out * self.layer_scalar[...][None, None] if self.scaled else out, expert_ids


class Decoder(nnx.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig, *, dtype: str, mesh: Mesh | None) -> None:
        count, scale = rounded_up(config.vocab_size, mesh), config.embed_scale
        self.embed_tokens = Embedding(count, config.hidden_size, scale=scale, dtype=dtype, mesh=mesh)
        layers = (config.layers[i] for i in range(config.num_hidden_layers))
        self.layers = nnx.List([DecoderLayer(config, layer, dtype=dtype) for layer in layers])
        self.norm = norm_of(config, config.hidden_size, dtype=dtype)


class CausalLM(nnx.Module):
    """A language model: read-only weights, no cache, no random state.

    Attributes:
        config: its configuration.
        dtype: name of the dtype of weights and activations.
        mesh: the devices that share the heads and the vocabulary; None: one device.
    """

    def __init__(self, config: ModelConfig, *, dtype: str, mesh: Mesh | None = None) -> None:
        self.config, self.dtype, self.mesh = config, dtype, mesh
        self.model = Decoder(config, dtype=dtype, mesh=mesh)
        spread(self.model.layers, mesh)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, rounded_up(config.vocab_size, mesh), bias=False, dtype=dtype)

    @property
    def ends(self) -> Ends:
        """The embedding, the final norm and the output head."""
        config, embedding = self.config, self.model.embed_tokens
        head = embedding.weight if config.tie_word_embeddings else self.lm_head.weight
        return Ends(embedding, self.model.norm, head, config.final_logit_softcapping, config.vocab_size, self.mesh)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Returns the fp32 logits of the last layer's output."""
        return self.ends.on_devices(Ends.logits, x)
