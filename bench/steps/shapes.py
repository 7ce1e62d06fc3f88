"""Models to time, by name: the shapes of published models with random weights, and the bundled model."""

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
from icejax.api.generate import ASSETS
from icejax.checkpoint.load import DTYPES
from icejax.checkpoint.quantized.cpu_codes import for_cpu
from icejax.checkpoint.quantized.layouts import QuantizedMatrix
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer, one_of
from icejax.models.decoder import CausalLM
from icejax.models.parts.latent_attention import BY_HEAD
from icejax.models.registry import family
from icejax.ops.quantized.products import Grouped
from icejax.ops.quantized.rounding import quantize
from icejax.runtime import devices

_LLAMA = dict(model_type="llama", rms_norm_eps=1e-5, max_position_embeddings=2**21, hidden_act="silu")
_PUBLISHED = dict(vocab_size=128256, rope_parameters=dict(rope_type="default", rope_theta=5e5), head_dim=128)
# `attention` has little besides attention, so its time is the cache's.
SHAPES = {
    "smollm2-135m": _LLAMA | dict(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    ),
    "qwen2.5-coder-0.5b": _LLAMA | dict(
        model_type="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "llama-3.2-1b": _LLAMA | _PUBLISHED | dict(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, tie_word_embeddings=True,
    ),
    "llama-3.1-8b": _LLAMA | _PUBLISHED | dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "llama-3.1-70b": _LLAMA | _PUBLISHED | dict(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "llama-2-70b": _LLAMA | dict(
        vocab_size=32000, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, tie_word_embeddings=False,
    ),
    "codestral-22b": _LLAMA | dict(
        model_type="mistral", vocab_size=32768, hidden_size=6144, intermediate_size=16384, num_hidden_layers=56,
        num_attention_heads=48, num_key_value_heads=8, head_dim=128, sliding_window=None, tie_word_embeddings=False,
    ),
    "deepseek-r1-distill-qwen-7b": _LLAMA | dict(
        model_type="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
    ),
    "deepseek-v2-lite": dict(
        model_type="deepseek_v2", vocab_size=102400, hidden_size=2048, intermediate_size=10944, num_hidden_layers=27,
        num_attention_heads=16, max_position_embeddings=2**21, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, n_routed_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1,
    ),
    "qwen3-30b-a3b": dict(
        model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, max_position_embeddings=2**21, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, rope_theta=1e6, tie_word_embeddings=False,
    ),
    "deepseek-r1": dict(
        model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
        num_attention_heads=128, max_position_embeddings=2**21, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256, n_shared_experts=1, n_group=8, topk_group=4,
        num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3, tie_word_embeddings=False,
    ),
    "attention": _LLAMA | _PUBLISHED | dict(
        vocab_size=256, hidden_size=512, intermediate_size=512, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=True,
    ),
}  # fmt: skip
NAMES = ("bundled", *SHAPES)
NUMBERS = 2**20  # random numbers, which all weights repeat


def raw_config(name: str, *, layers: int | None = None) -> dict:
    """Returns the config.json of a shape, with `layers` layers if given; InputError for `layers` of the bundled model."""
    if layers is None:
        return json.loads((ASSETS / "config.json").read_text()) if name == "bundled" else dict(SHAPES[name])
    if name == "bundled":
        raise InputError("--layers is for random weights of a shape: the bundled model has those that it was trained with")
    return SHAPES[name] | dict(num_hidden_layers=integer("--layers", layers, most=1024))


def as_llama(raw: dict) -> dict:
    """Returns a config.json in the form of transformers' LlamaConfig; InputError for a model type with other layers."""
    if raw["model_type"] not in ("llama", "mistral"):
        raise InputError(f"transformers is timed with Llama's layers, and this shape is {raw['model_type']}'s")
    return {name: value for name, value in raw.items() if name != "model_type"}


def model(name: str, *, dtype: str, layers: int | None = None) -> CausalLM:
    """Returns the model of a shape; its random weights have a standard deviation of fan_in^-1/2."""
    one_of("--dtype", dtype, DTYPES)
    raw = raw_config(name, layers=layers)
    if name == "bundled":
        loaded = icejax.load(dtype=dtype)[0]
        loaded.config = replace(loaded.config, max_position_embeddings=2**21)
        return loaded
    config = family(raw).read_config(raw)
    return drawn(nnx.eval_shape(lambda: CausalLM(config, dtype=dtype)))


def drawn(model: CausalLM) -> CausalLM:
    """Returns an abstract model with random weights in place of its shapes; codes are rounded random weights.

    The weights have the layout that a loaded checkpoint has on this platform. The model has no end-of-text token.
    """
    graph, state = nnx.split(model)
    noise = jnp.asarray(np.random.default_rng(0).standard_normal(NUMBERS), jnp.float32)

    def draw(path: tuple, x: jax.ShapeDtypeStruct | Grouped) -> jax.Array | Grouped:
        weights, by_head = numbers(x), jax.tree_util.keystr(path[:-1], simple=True, separator=".").endswith(BY_HEAD)
        return weights if devices.platform() != "cpu" or by_head else _on_a_cpu(weights)

    def numbers(x: jax.ShapeDtypeStruct | Grouped) -> jax.Array | Grouped:
        if isinstance(x, Grouped):
            *_, groups, _, columns = x.codes.shape
            deviation = jnp.float32((groups * columns) ** -0.5)
            wide = _repeated(noise, deviation, shape=x.codes.shape, dtype=jnp.dtype("float32"))
            codes, scale = quantize(wide, x.codes.dtype, axis=-1, scale_dtype="bfloat16")
            return Grouped(codes, scale[..., 0].astype(x.scale.dtype), None)
        if len(x.shape) == 1:
            return jnp.ones(x.shape, x.dtype)
        return _repeated(noise, jnp.float32(x.shape[1] ** -0.5), shape=x.shape, dtype=x.dtype)

    result = nnx.merge(graph, jax.tree.map_with_path(draw, state, is_leaf=lambda x: isinstance(x, Grouped)))
    result.config = replace(result.config, eos_token_ids=())
    return result


def _on_a_cpu(x: jax.Array | Grouped) -> jax.Array | Grouped:
    stored = for_cpu(
        QuantizedMatrix(np.asarray(x.codes), np.asarray(x.scale), None) if isinstance(x, Grouped) else np.asarray(x)
    )
    if not isinstance(stored, QuantizedMatrix):
        return x
    return Grouped(jnp.asarray(stored.codes), jnp.asarray(stored.scale), None, by_row=True)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _repeated(noise: jax.Array, scale: jax.Array, *, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Returns the scaled `noise` repeated up to `shape`: only `noise` is drawn, and copied from the host to the device."""
    size = math.prod(shape)
    return jnp.tile((noise * scale).astype(dtype), -(-size // NUMBERS))[:size].reshape(shape)
