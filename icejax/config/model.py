"""The configuration of a model and of its layers, with Hugging Face's field names where they exist.

Families build it from config.json; the decoder, the cache registry and the engine read it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from icejax.checks.numbers import POSITIONS
from icejax.config.experts import Experts
from icejax.config.rope import Rope, RopeScaling

LayerType = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads come from one cached latent.

    Attributes:
        kv_lora_rank: channels of the latent.
        q_lora_rank: channels of the queries' own latent; None: queries are projected directly.
        qk_nope_head_dim: channels of a head's queries and keys that RoPE does not rotate. The rotated channels are
            `rotary_dim`; all heads share one rotated key.
        v_head_dim: channels of a head's values.
    """

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The attention and the MLP of one layer.

    Attributes:
        kv_heads: number of KV heads.
        head_dim: size of a query, key or value.
        values_from_keys: whether values are the keys before norm and RoPE, without a projection of their own.
        window: newest tokens that a query sees, itself included; None: all.
        scale: factor of the products of queries and keys.
        rope: RoPE of queries and keys.
        softcap: bound of the scaled products, by tanh; None: no bound.
        experts: the experts of the layer; None: one MLP for all tokens.
        sinks: whether each query head has a learned score that takes part in its softmax without a value.
    """

    kv_heads: int
    head_dim: int
    values_from_keys: bool
    window: int | None
    scale: float
    rope: Rope
    softcap: float | None = None
    experts: Experts | None = None
    sinks: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder of the llama-like families, with the fields of its config.json.

    Attributes:
        layer_types: the attention of each layer.
        sliding_window: newest tokens that a query of a sliding layer sees, itself included; None: no sliding layers.
        qkv_bias, o_bias, mlp_bias: which projections have a bias.
        num_key_value_heads, head_dim: number and size of the cached keys' heads. With latent attention there is one head, which
            holds the latent and the rotated channels.
        rotary_dim: number of channels of a head that RoPE rotates: its first channels, or its last with latent attention.
        qk_norm: whether an RMSNorm of queries and keys before RoPE runs over each head (`head`, Qwen3) or over all heads at
            once (`all`, MiniMax-M2); None: no such norm.
        dtype: name of the checkpoint's dtype.
        eos_token_ids: the token ids that end a text.
        experts: the experts of all layers except `dense_layers`; None: every layer has one MLP of `intermediate_size`.
        dense_layers: indices of layers that have one MLP although the model has experts.
        norm: how an RMSNorm applies its weight: to vectors rounded to the activations' dtype (`rounded`), in fp32 (`wide`), or
            as 1 + weight in fp32 (`offset`).
        norm_places: whether norms come before, after or on both sides of attention and MLP.
        rope_interleave: whether RoPE pairs neighbouring channels instead of channels of the two halves.
        hidden_act: activation of the MLP's gate.
        embed_scale: factor of the embeddings, rounded to their dtype.
        query_pre_attn_scalar: x in the factor x^-0.5 of the products of queries and keys; None: `head_dim`.
        v_norm: whether the values of each head pass an RMSNorm without a weight.
        values_from_keys: whether values of full-attention layers are the keys before norm and RoPE.
        layer_scalar: whether a learned number multiplies each layer's output.
        sliding_rope, sliding_head_dim, sliding_key_value_heads: RoPE, `head_dim` and `num_key_value_heads` of the sliding
            layers; None: as in the other layers.
        sinks: as in `LayerConfig`, for all layers.
        attn_logit_softcapping: bound of the attention scores, by tanh (Gemma 2); None: no bound.
        final_logit_softcapping: bound of the logits, by tanh; None: no bound.
        latent: multi-head latent attention; None: each KV head has keys and values of its own.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: Literal["head", "all"] | None
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...] = ()
    experts: Experts | None = None
    dense_layers: tuple[int, ...] = ()
    norm: Literal["rounded", "wide", "offset"] = "rounded"
    norm_places: Literal["before", "after", "both"] = "before"
    rope_interleave: bool = False
    hidden_act: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    embed_scale: float = 1.0
    query_pre_attn_scalar: float | None = None
    v_norm: bool = False
    values_from_keys: bool = False
    layer_scalar: bool = False
    sliding_rope: Rope | None = None
    sliding_head_dim: int | None = None
    sliding_key_value_heads: int | None = None
    sinks: bool = False
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    latent: Latent | None = None

    @property
    def value_dim(self) -> int:
        """Channels of a cached value."""
        return self.head_dim if self.latent is None else self.latent.kv_lora_rank

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """The attention and the MLP of every layer."""
        scale = (self.query_pre_attn_scalar or self.head_dim) ** -0.5
        if self.latent is not None:
            scale = (self.latent.qk_nope_head_dim + self.rotary_dim) ** -0.5
            scale *= 1.0 if self.rope_scaling is None else self.rope_scaling.score_factor
        full = LayerConfig(
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            values_from_keys=self.values_from_keys,
            window=None,
            scale=scale,
            rope=Rope(size=self.rotary_dim, theta=self.rope_theta, scaling=self.rope_scaling),
            softcap=self.attn_logit_softcapping,
            sinks=self.sinks,
        )
        sliding = replace(
            full,
            kv_heads=self.sliding_key_value_heads or full.kv_heads,
            head_dim=self.sliding_head_dim or full.head_dim,
            values_from_keys=False,
            window=self.sliding_window,
            rope=self.sliding_rope or full.rope,
        )
        of_type = {"full_attention": full, "sliding_attention": sliding}
        experts = (None if i in self.dense_layers else self.experts for i in range(len(self.layer_types)))
        return tuple(replace(of_type[kind], experts=mixture) for kind, mixture in zip(self.layer_types, experts, strict=True))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Newest tokens that a query of each layer sees, itself included; None: all."""
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)

    @property
    def short_context(self) -> int | None:
        """Tokens of the longest text whose keys have LongRoPE's short factors; None without LongRoPE.

        When a text becomes longer, all its keys must be computed again.
        """
        scaling = self.rope_scaling
        return scaling.original_max_position_embeddings if scaling is not None and scaling.rope_type == "longrope" else None

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer that the model supports, at most `POSITIONS`.

        For `linear`, `dynamic` and `yarn` scaling: the trained context times the factor. `max_position_embeddings` may not
        count the factor in: Qwen's cards put yarn with a factor of 4 into a config of 32,768, which then has 131,072.
        """
        tokens, scaling = self.max_position_embeddings, self.rope_scaling
        if scaling is not None and scaling.rope_type in ("linear", "dynamic"):
            tokens = int(scaling.original_max_position_embeddings * scaling.factor)
        if scaling is not None and scaling.rope_type == "yarn":
            tokens = max(tokens, int(scaling.original_max_position_embeddings * scaling.factor))
        return min(tokens, POSITIONS)
