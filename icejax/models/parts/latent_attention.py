"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1): a cache keeps one latent per token for all heads.

Decoder layers of latent models hold it in place of `Attention`, with the same methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from icejax.config import LayerConfig, ModelConfig
from icejax.models.parts.linear import Linear, RMSNorm
from icejax.ops.attention.dense import EINSUM
from icejax.ops.rope import cos_sin, deinterleave, rerotate, rotate, scale_queries

EPS = 1e-6  # of the norms of latents; the config's epsilon is for the other norms
BY_HEAD = ".kv_b_proj.weight"  # end of the keys of matrices that are multiplied head by head
HEADS_AT_ONCE = 16  # heads whose keys and values exist at once; for 128 heads they would take 82 KB a token


class Expanded(NamedTuple):
    """The expanded heads for prefill, made group by group.

    Attributes:
        groups: number of groups.
        of: group number i32[] -> its queries and keys [B, T, n, H] and values [B, T, n, Hv].
    """

    groups: int
    of: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]


class LatentAttention(nnx.Module):
    """Projections and RoPE of latent attention, in two forms with the same result.

    The cache keeps one key per token for all heads: the latent, which is also the value, and after it a part with RoPE. In the
    absorbed form queries are multiplied by the key projection, and `output` applies the value projection to the attended
    latents. The expanded form has keys and values of every head: fewer multiplications when there are many queries.
    """

    def __init__(self, config: ModelConfig, layer: LayerConfig, *, dtype: str) -> None:
        self.config, self.rope, heads = config.latent, layer.rope, config.num_attention_heads
        self.interleaved = config.rope_interleave
        hidden, rank, q_rank = config.hidden_size, config.latent.kv_lora_rank, config.latent.q_lora_rank
        queries = heads * (config.latent.qk_nope_head_dim + layer.rope.size)
        if q_rank is None:
            self.q_proj = Linear(hidden, queries, bias=False, dtype=dtype)
        else:
            self.q_a_proj = Linear(hidden, q_rank, bias=config.qkv_bias, dtype=dtype)
            self.q_a_layernorm = RMSNorm(q_rank, eps=EPS, dtype=dtype)
            self.q_b_proj = Linear(q_rank, queries, bias=False, dtype=dtype)
        self.kv_a_proj_with_mqa = Linear(hidden, rank + layer.rope.size, bias=config.qkv_bias, dtype=dtype)
        self.kv_a_layernorm = RMSNorm(rank, eps=EPS, dtype=dtype)
        kv_channels = heads * (config.latent.qk_nope_head_dim + config.latent.v_head_dim)
        self.kv_b_proj = Linear(rank, kv_channels, bias=False, dtype=dtype)
        self.o_proj = Linear(heads * config.latent.v_head_dim, hidden, bias=config.o_bias, dtype=dtype)

    def project(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], seen: Int[Array, " B"]):
        """Returns the queries of all heads, and the latent and the part with RoPE of each token's key: the input of `heads`."""
        rank, plain = self.config.kv_lora_rank, self.config.qk_nope_head_dim
        with jax.named_scope("qkv"):
            q = self.q_proj(x) if self.config.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
            q = q.reshape(*x.shape[:2], -1, plain + self.rope.size)
            compressed = self.kv_a_proj_with_mqa(x)[:, :, None]
            latent = self.kv_a_layernorm(compressed[..., :rank])
        with jax.named_scope("rope"):
            cos, sin = cos_sin(positions, seen, rope=self.rope)
            rope_parts = (q[..., plain:], compressed[..., rank:])
            if self.interleaved:
                rope_parts = (deinterleave(y, self.rope.size) for y in rope_parts)
            rotated, key = (rotate(y, cos, sin) for y in rope_parts)
            return scale_queries(jnp.concatenate([q[..., :plain], rotated], axis=-1), positions, rope=self.rope), latent, key

    def heads(self, q: Float[Array, "B T N H"], latent: Float[Array, "B T 1 C"], key: Float[Array, "B T 1 R"]):
        """Returns the fields of `LayerHeads`: absorbed queries, the cached key and value of all heads, and the expanded heads.

        Example: DeepSeek-V3 has 128 heads, a latent of 512 channels and 64 rotated ones: queries [B, T, 128, 576], keys
        [B, T, 1, 576], values [B, T, 1, 512].
        """
        plain = self.config.qk_nope_head_dim
        with jax.named_scope("qkv"):
            absorbed = EINSUM("btnh,nhc->btnc", q[..., :plain], self._made[:, :plain]).astype(q.dtype)
            absorbed = jnp.concatenate([absorbed, q[..., plain:]], axis=-1)
        return absorbed, jnp.concatenate([latent, key], axis=-1), latent, self._expanded(q, latent[:, :, 0], key)

    def rerotate(
        self, heads: Float[Array, "#B T N H"], by: Int[Array, "#B T"], seen: Int[Array, " #B"]
    ) -> Float[Array, "#B T N H"]:
        """Returns cached keys, or absorbed queries, as if their tokens stood `by` positions later."""
        rotated = rerotate(heads[..., self.config.kv_lora_rank :], by, seen, rope=self.rope)
        latent = jnp.broadcast_to(heads[..., : self.config.kv_lora_rank], (*rotated.shape[:-1], self.config.kv_lora_rank))
        return jnp.concatenate([latent, rotated], axis=-1)

    def output(self, heads: Float[Array, "B T N H"], *, expanded: bool = False) -> Float[Array, "B t D"]:
        """Returns the attention block's output from attended latents, or from attended values if `expanded`."""
        if not expanded:
            # Makes keys too and drops them: XLA:GPU would copy the value half of the weights.
            keys_and_values = EINSUM("btnc,nhc->btnh", heads, self._made)
            heads = keys_and_values[..., self.config.qk_nope_head_dim :].astype(heads.dtype)
        return self.o_proj(heads.reshape(*heads.shape[:2], -1))

    @property
    def _made(self) -> Float[Array, "N H C"]:
        """The weights from a latent to each head's key channels, and after them its value channels."""
        channels = self.config.qk_nope_head_dim + self.config.v_head_dim
        return self.kv_b_proj.weight[...].reshape(-1, channels, self.config.kv_lora_rank)

    def _expanded(self, q: Float[Array, "B T N H"], latent: Float[Array, "B T C"], key: Float[Array, "B T 1 R"]) -> Expanded:
        """Returns expanded heads in equal groups of at most `HEADS_AT_ONCE`; 24 heads make 2 groups of 12."""
        heads = q.shape[2]
        count = max(n for n in range(1, min(heads, HEADS_AT_ONCE) + 1) if heads % n == 0)

        def expand_group(group: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            queries = lax.dynamic_slice_in_dim(q, group * count, count, axis=2)
            group_weights = lax.dynamic_slice_in_dim(self._made, group * count, count, axis=0)
            keys_and_values = EINSUM("btc,nhc->btnh", latent, group_weights).astype(q.dtype)
            k, v = jnp.split(keys_and_values, [self.config.qk_nope_head_dim], axis=-1)
            rotated = jnp.broadcast_to(key, (*k.shape[:3], key.shape[-1]))
            return queries, jnp.concatenate([k, rotated], axis=-1), v

        return Expanded(heads // count, expand_group)
