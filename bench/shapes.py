"""Models to time, by name: their shapes are those of published models, their weights random."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import icejax
from icejax.generation import ASSETS
from icejax.models import CausalLM, family

_LLAMA = dict(model_type="llama", rms_norm_eps=1e-5, max_position_embeddings=2**21, hidden_act="silu")
_PUBLISHED = dict(vocab_size=128256, rope_parameters=dict(rope_type="default", rope_theta=5e5), head_dim=128)
# `attention` is the cache's own cost: little else is in it.
SHAPES = {
    "llama-3.2-1b": _LLAMA | _PUBLISHED | dict(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, tie_word_embeddings=True,
    ),
    "llama-3.1-8b": _LLAMA | _PUBLISHED | dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "deepseek-v2-lite": dict(
        model_type="deepseek_v2", vocab_size=102400, hidden_size=2048, intermediate_size=10944, num_hidden_layers=27,
        num_attention_heads=16, max_position_embeddings=2**21, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, n_routed_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1,
    ),
    "attention": _LLAMA | _PUBLISHED | dict(
        vocab_size=256, hidden_size=512, intermediate_size=512, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=True,
    ),
}  # fmt: skip
NAMES = ("bundled", *SHAPES)
NUMBERS = 2**20  # that are drawn for all weights


def raw_config(name: str, *, layers: int | None = None) -> dict:
    """Returns the config.json of a shape, with another number of layers if given."""
    raw = json.loads((ASSETS / "config.json").read_text()) if name == "bundled" else dict(SHAPES[name])
    return raw | dict(num_hidden_layers=layers) if layers else raw


def model(name: str, *, dtype: str, layers: int | None = None) -> CausalLM:
    """Returns the model of a shape; random weights have a standard deviation of fan_in^-1/2."""
    if name == "bundled":
        loaded = icejax.load(dtype=dtype)[0]
        loaded.config = replace(loaded.config, max_position_embeddings=2**21)
        return loaded
    raw = raw_config(name, layers=layers)
    config = replace(family(raw).read_config(raw), eos_token_ids=())
    graph, state = nnx.split(nnx.eval_shape(lambda: CausalLM(config, dtype=dtype)))
    noise = jnp.asarray(np.random.default_rng(0).standard_normal(NUMBERS), jnp.float32)

    def draw(x: jax.ShapeDtypeStruct) -> jax.Array:
        if len(x.shape) == 1:
            return jnp.ones(x.shape, x.dtype)
        return _repeated(noise, jnp.float32(x.shape[1] ** -0.5), shape=x.shape, dtype=x.dtype)

    return nnx.merge(graph, jax.tree.map(draw, state))


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _repeated(noise: jax.Array, scale: jax.Array, *, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Returns scaled numbers over and over, in `shape`: only they are drawn, and go from the host to the device."""
    size = math.prod(shape)
    return jnp.tile((noise * scale).astype(dtype), -(-size // NUMBERS))[:size].reshape(shape)
