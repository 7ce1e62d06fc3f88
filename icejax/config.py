"""What a model is: frozen, hashable, with Hugging Face's field names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from icejax.checks.numbers import POSITIONS

LayerType = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are changed for longer contexts; the fields are those of `rope_type`'s own paper or code.

    Attributes:
        rope_type: `linear` (kaiokendev), `dynamic` (NTK by length, bloc97), `yarn` (arXiv 2309.00071), `llama3`, `longrope`
            (arXiv 2402.13753) or `proportional` (Gemma 4).
        factor: how much longer the context is than the original one.
        original_max_position_embeddings: tokens of the original context (`dynamic`: of the trained context).
        low_freq_factor, high_freq_factor: `llama3` only, bounds of the smoothed band.
        attention_factor: `yarn` and `longrope` only, what cos and sin are multiplied by.
        beta_fast, beta_slow, truncate: `yarn` only, bounds of the ramp, and whether they are rounded outwards.
        query_beta: `yarn` only, by how much queries grow: each is multiplied by 1 + query_beta ln(1 + n), n being how many
            original contexts lie before it (Ministral 3).
        factors, short_factors: `longrope` only, what each frequency is divided by, and what in a text that stays within the
            original context.
        part: `proportional` only, the share of frequencies, the highest ones, that are not 0.
        score_factor: `yarn` only, what scores of multi-head latent attention are multiplied by.
    """

    rope_type: Literal["linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]
    factor: float
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    attention_factor: float = 1.0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    truncate: bool = True
    query_beta: float = 0.0
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    part: float = 1.0
    score_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embeddings of the first `size` channels of a head."""

    size: int
    theta: float
    scaling: RopeScaling | None


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): all heads are made of one latent, which is what is kept.

    Attributes:
        kv_lora_rank: channels of the latent.
        q_lora_rank: channels of another that queries are made of; None: they are projected at once.
        qk_nope_head_dim: channels of a head's queries and keys that RoPE does not rotate; the rotated ones, of keys one for
            all heads, are `rotary_dim`.
        v_head_dim: channels of a head's values.
    """

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How tokens choose experts by the logits of a router, and with what weights they take them.

    Attributes:
        score: what makes scores of the logits.
        biased: whether the logits have a bias.
        scaled: whether the weights of each expert are multiplied by a number of its own.
        corrected: whether a bias of each expert is added to the scores to choose by, and not to those that become weights.
        groups: of neighbouring experts; those of the best `chosen_groups` alone are chosen among.
        group_best: how many of its best experts add up to what a group is worth.
        normed: whether the scores of those a token takes are divided by their sum.
        factor: what they are then multiplied by.
    """

    score: Literal["softmax", "sigmoid"]
    corrected: bool
    groups: int
    chosen_groups: int
    group_best: int
    normed: bool
    factor: float
    biased: bool = False
    scaled: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertForm:
    """How experts compute.

    Attributes:
        act: the activation of their gates.
        limit: of gates, and of the magnitude of what they gate, to which 1 is added then (gpt-oss); None: there is none.
        alpha: with a limit the activation is the gate times the sigmoid of `alpha` times it.
        biased: whether all products have a bias.
    """

    act: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    limit: float | None = None
    alpha: float = 1.0
    biased: bool = False


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The MLPs of a layer of which each token takes a few.

    Attributes:
        count: how many there are.
        chosen: how many a token takes.
        size: the inner size of each.
        routing: how they are chosen.
        shared: the inner size of one more that all tokens take; 0: there is none.
        shared_gated: whether that is multiplied by the sigmoid of a gate of its own.
        form: how they compute.
        beside: whether they stand beside the layer's one MLP, with norms of their own, instead of in its place (Gemma 4).
    """

    count: int
    chosen: int
    size: int
    routing: Routing
    shared: int
    shared_gated: bool
    form: ExpertForm = ExpertForm()
    beside: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """How one layer attends, and what its MLP is.

    Attributes:
        kv_heads, head_dim: how many heads keys and values have, and how large they and those of queries are.
        keys_alone: whether values are what keys are before norm and RoPE.
        window: tokens it sees, the newest included; None: all.
        scale: what products of queries and keys are multiplied by.
        rope: of its queries and keys.
        softcap: what the scaled products then come near and never exceed, by tanh; None: no bound.
        experts: those its tokens choose among; None: one MLP for all tokens.
        sinks: whether each query head has a score of its own that takes part in its softmax and has no value.
    """

    kv_heads: int
    head_dim: int
    keys_alone: bool
    window: int | None
    scale: float
    rope: Rope
    softcap: float | None = None
    experts: Experts | None = None
    sinks: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder of the llama-like families.

    Attributes:
        layer_types: one of `full_attention` and `sliding_attention` per layer.
        sliding_window: tokens a sliding layer sees, the newest included; None without such layers.
        qkv_bias, o_bias, mlp_bias: which projections have a bias.
        num_key_value_heads, head_dim: of keys as a cache keeps them: with latent attention one, of the latent and the
            rotated channels.
        rotary_dim: the first channels of a head that RoPE rotates; the last with latent attention.
        qk_norm: over what queries and keys pass an RMSNorm before RoPE: each head (Qwen3), or all at once (MiniMax-M2).
        dtype: the checkpoint's own dtype, by name.
        eos_token_ids: every token id that ends a text.
        experts: those of every layer but the `dense_layers`, which have one MLP of `intermediate_size`; None: all have.
        norm: how RMSNorms multiply by their weight: what is `rounded` to the activations' dtype before, in fp32 (`wide`), or in
            fp32 by 1 + weight (`offset`).
        norm_places: on which side of a layer's two blocks there is a norm.
        rope_interleave: whether RoPE rotates pairs of neighbouring channels, instead of the halves of what it rotates.
        hidden_act: the activation of an MLP's gate.
        embed_scale: what embeddings are multiplied by, rounded to their dtype.
        query_pre_attn_scalar: whose inverse root products of queries and keys are multiplied by; None: `head_dim`.
        v_norm: whether values pass an RMSNorm without a weight over each head.
        keys_alone: whether in full-attention layers values are what keys are before norm and RoPE.
        layer_scalar: whether a layer's output is multiplied by a number of its own.
        sliding_rope, sliding_head_dim, sliding_key_value_heads: RoPE, `head_dim` and `num_key_value_heads` of the sliding
            layers; None: all layers have the same.
        sinks: as in a LayerConfig, in all layers.
        attn_logit_softcapping: what scores of attention come near and never exceed, by tanh (Gemma 2); None: no bound.
        final_logit_softcapping: what logits come near and never exceed, by tanh; None: no bound.
        latent: how heads are made of a latent; None: each has keys and values of its own.
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
    keys_alone: bool = False
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
        """Channels of values as a cache keeps them."""
        return self.head_dim if self.latent is None else self.latent.kv_lora_rank

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """How every layer attends, and what its MLP is."""
        scale = (self.query_pre_attn_scalar or self.head_dim) ** -0.5
        if self.latent is not None:
            scale = (self.latent.qk_nope_head_dim + self.rotary_dim) ** -0.5
            scale *= 1.0 if self.rope_scaling is None else self.rope_scaling.score_factor
        full = LayerConfig(
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            keys_alone=self.keys_alone,
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
            keys_alone=False,
            window=self.sliding_window,
            rope=self.sliding_rope or full.rope,
        )
        of_type = {"full_attention": full, "sliding_attention": sliding}
        experts = (None if i in self.dense_layers else self.experts for i in range(len(self.layer_types)))
        return tuple(replace(of_type[kind], experts=own) for kind, own in zip(self.layer_types, experts, strict=True))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that each layer sees, the newest included; None: all."""
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)

    def for_capacity(self, tokens: int) -> ModelConfig:
        """Returns the model for texts of at most so many tokens."""
        scaling = self.rope_scaling
        if scaling is None or not scaling.short_factors or tokens > scaling.original_max_position_embeddings:
            return self
        return replace(self, rope_scaling=replace(scaling, factors=scaling.short_factors))

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer it is made for, with scalings that configs do not count in; at most `POSITIONS`."""
        own, scaling = self.max_position_embeddings, self.rope_scaling
        if scaling is not None and scaling.rope_type in ("linear", "dynamic"):
            own = int(scaling.original_max_position_embeddings * scaling.factor)
        return min(own, POSITIONS)
