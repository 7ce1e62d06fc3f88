"""The config.json that a GGUF file's values and tensors stand for, in Hugging Face's names.

`icejax.checkpoint.gguf.folder` calls it. `icejax.models.registry` reads the result as it reads a published config.json.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from icejax.checkpoint.gguf.metadata import Tensor
from icejax.checkpoint.gguf.vocabulary import NO_TOKEN, PREFIX
from icejax.checks.errors import InputError, listed, quoted
from icejax.models.hf.fields import Fields

LOG = logging.getLogger(__name__)
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)  # of Llama 3.1 to 3.3
# Values that change no number, or that repeat what the tensors say; `general`, `tokenizer` and `split` are read elsewhere.
IRRELEVANT = """vocab_size rope.scaling.finetuned attention.key_length_swa attention.value_length_swa
    rope.dimension_count_swa""".split()
Read = Callable[[str], np.ndarray]


class _Source:
    """The values of one architecture, and the tensors; messages name the file."""

    def __init__(self, values: dict[str, Any], tensors: Mapping[str, Tensor], read: Read, source: str) -> None:
        self.fields, self.tensors, self._read = Fields(values, source), tensors, read
        self.architecture = self.fields.take("general.architecture", str)
        if self.architecture not in ARCHITECTURES:
            raise InputError(
                f"{source}: the architecture {quoted(self.architecture)} is not read from GGUF: expected one of "
                f"{', '.join(ARCHITECTURES)}; a Hugging Face folder of the model may be read"
            )

    def whole(self, name: str, *, least: int = 1, default: Any = ...) -> Any:
        """Returns a whole number; of a number per layer, which must then be the same in all layers, that one."""
        key = f"{self.architecture}.{name}"
        value = self.fields.raw.get(key)
        if isinstance(value, np.ndarray) and len(value):
            if (value != value[0]).any():
                raise InputError(f"{self.fields.source}: {key!r} differs from layer to layer, which is not supported")
            self.fields.raw = self.fields.raw | {key: value[0].item()}
        return self.fields.whole(key, least=least, default=default)

    def number(self, name: str, *, least: float = 1e-30, most: float = 1e30, default: Any = ...) -> Any:
        return self.fields.number(f"{self.architecture}.{name}", least=least, most=most, default=default)

    def token(self, role: str) -> int | None:
        """Returns the id of a special token; None: the file names no such token."""
        token = self.fields.whole(f"{PREFIX}{role}_token_id", least=-1, most=2**32 - 1, default=None)
        return None if token in NO_TOKEN else token

    def text(self, name: str, *, default: Any = ...) -> Any:
        return self.fields.take(f"{self.architecture}.{name}", str, default=default)

    def vector(self, name: str) -> list[float] | None:
        """Returns the numbers of a tensor with one axis; None: the file has no such tensor."""
        if name not in self.tensors:
            return None
        if len(shape := self.tensors[name].shape) != 1 or shape[0] > 2**12:
            raise InputError(f"{self.fields.source}: {name} has shape {list(shape)}, expected one number per frequency")
        return [float(str(x)) for x in self._read(name).astype(np.float32)]


def raw_config(values: dict[str, Any], tensors: Mapping[str, Tensor], *, read: Read, source: str) -> dict[str, Any]:
    """Returns the config.json of a GGUF model.

    Args:
        values: the file's values by key.
        tensors: its tensors by name.
        read: name of a tensor -> its numbers.
        source: name of the file in messages.

    Raises:
        InputError: the architecture is not supported, or a value is missing or out of range.
    """
    model = _Source(values, tensors, read, source)
    model_type, fill = ARCHITECTURES[model.architecture]
    if EMBEDDING not in tensors or len(tensors[EMBEDDING].shape) != 2:
        raise InputError(f"{source} has no matrix {EMBEDDING}: expected a language model, whole or with all of its parts")
    heads, width = model.whole("attention.head_count"), model.whole("embedding_length")
    head_dim = _head_dim(model, width, heads)
    config = dict(
        model_type=model_type,
        vocab_size=tensors[EMBEDDING].shape[0],
        hidden_size=width,
        intermediate_size=_inner_size(model),
        num_hidden_layers=model.whole("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=model.whole("attention.head_count_kv", default=heads),
        head_dim=head_dim,
        max_position_embeddings=model.whole("context_length"),
        rms_norm_eps=model.number("attention.layer_norm_rms_epsilon"),
        tie_word_embeddings=HEAD not in tensors,
        dtype="float32" if all(tensor.type == "F32" for tensor in tensors.values()) else "bfloat16",
        eos_token_id=model.token("eos"),
        bos_token_id=model.token("bos"),
    )
    if not model.fields.take(f"{model.architecture}.attention.causal", bool, default=True):
        raise InputError(f"{source}: attention.causal is false: attention to later tokens is not supported")
    theta = model.number("rope.freq_base", default=1e4)
    config["rope_parameters"] = {"rope_theta": theta} | _scaling(model, config)
    rotated = model.whole("rope.dimension_count", default=head_dim)
    if rotated != head_dim and model_type != "phi3":
        raise InputError(f"{source}: rope.dimension_count is {rotated}, expected the heads' size, {head_dim}")
    config |= fill(model, config | {"rotated": rotated})
    _tell_others(model)
    return config


def _head_dim(model: _Source, width: int, heads: int) -> int:
    # Files of 2024 give Mistral Nemo's head size as the number of rotated dimensions alone.
    named = model.whole("rope.dimension_count", default=None) if model.architecture in ("llama", "mistral") else None
    size = model.whole("attention.key_length", default=named or width // heads)
    if (values := model.whole("attention.value_length", default=size)) != size:
        raise InputError(f"{model.fields.source}: keys have {size} dimensions and values {values}, expected the same number")
    return size


def _inner_size(model: _Source) -> int:
    """Returns the inner size of an MLP; of an expert, where every layer has experts."""
    return model.whole("feed_forward_length", default=model.whole("expert_feed_forward_length", default=None) or ...)


def _scaling(model: _Source, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the scaling of RoPE, as `rope_parameters` names it; it may be in values, in tensors or in both."""
    kind = model.text("rope.scaling.type", default="linear")  # as in llama.cpp
    factor = model.number("rope.scaling.factor", least=0, default=None)
    if factor is None:
        factor = model.number("rope.scale_linear", least=0, default=None)  # the name of 2023
    original = model.whole("rope.scaling.original_context_length", default=None)
    strength = model.number("rope.scaling.attn_factor", default=None)
    long, short, divisors = (model.vector(name) for name in (LONG, SHORT, FREQUENCIES))
    if long is not None and short is not None:
        scaling = dict(rope_type="longrope", long_factor=long, short_factor=short, attention_factor=strength)
        return scaling | {"original_max_position_embeddings": original or config["max_position_embeddings"]}
    if divisors is not None:
        factor = 1.0 if kind == "none" or factor in (None, 0) else factor
        if kind not in ("none", "linear") and factor != 1:
            raise InputError(f"{model.fields.source}: rope.scaling.type {quoted(kind)} with {FREQUENCIES} is not supported")
        return _divided(model, [factor * divisor for divisor in divisors], config, strength or 1.0)
    if strength not in (None, 1) and kind in ("none", "linear"):
        raise InputError(
            f"{model.fields.source}: rope.scaling.attn_factor is {strength:g}, expected 1 without yarn or longrope"
        )
    if kind == "linear":
        return dict(rope_type="default") if factor in (None, 0, 1) else dict(rope_type="linear", factor=factor)
    if kind == "yarn":
        return _yarn(model, factor, original, strength)
    if kind not in ("none", "longrope"):
        raise InputError(f"{model.fields.source}: rope.scaling.type {quoted(kind)} is not supported (none, linear, yarn are)")
    if kind == "longrope":
        raise InputError(f"{model.fields.source}: rope.scaling.type is longrope, and {LONG} and {SHORT} are missing")
    return dict(rope_type="default")


def _yarn(model: _Source, factor: float | None, original: int | None, strength: float | None) -> dict[str, Any]:
    if model.number("rope.scaling.yarn_ext_factor", least=-1, default=1.0) not in (1.0, -1.0):
        raise InputError(f"{model.fields.source}: rope.scaling.yarn_ext_factor other than 1 is not supported")
    if not factor or factor < 1 or original is None:
        raise InputError(
            f"{model.fields.source}: rope.scaling.type yarn needs rope.scaling.factor of 1 or more and "
            "rope.scaling.original_context_length"
        )
    strength = model.number("rope.scaling.yarn_attn_factor", default=None) or strength or 1.0
    return dict(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=strength * (0.1 * math.log(factor) + 1.0),
        beta_fast=model.number("rope.scaling.yarn_beta_fast", default=32.0),
        beta_slow=model.number("rope.scaling.yarn_beta_slow", default=1.0),
    )


def _divided(model: _Source, divisors: list[float], config: dict[str, Any], strength: float) -> dict[str, Any]:
    """Returns the scaling whose frequencies are divided by these numbers: Llama 3.1's where they are its, else longrope."""
    size, theta = config["head_dim"], model.number("rope.freq_base", default=1e4)
    if len(divisors) * 2 == size:
        wavelengths = 2 * np.pi * theta ** (np.arange(0, size, 2) / size)
        part = LLAMA3["original_max_position_embeddings"] / wavelengths  # turns in the original context
        low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
        smooth, factor = np.clip((part - low) / (high - low), 0, 1), max(divisors)
        if factor >= 1 and strength == 1 and np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-5, atol=0):
            return dict(rope_type="llama3", factor=factor, **LLAMA3)
    both = dict(long_factor=divisors, short_factor=divisors, original_max_position_embeddings=config["max_position_embeddings"])
    return dict(rope_type="longrope", factor=1.0, attention_factor=strength, **both)


def _llama(model: _Source, config: dict[str, Any]) -> dict[str, Any]:
    if model.whole("expert_count", least=0, default=0):
        raise InputError(f"{model.fields.source} is a llama with experts (Mixtral), which is not read from GGUF")
    window = model.whole("attention.sliding_window", least=0, default=0)
    if window or model.architecture == "mistral":
        return dict(model_type="mistral", sliding_window=window or None)
    return dict(attention_bias="blk.0.attn_q.bias" in model.tensors, mlp_bias="blk.0.ffn_up.bias" in model.tensors)


def _qwen3(model: _Source, config: dict[str, Any]) -> dict[str, Any]:
    return dict(attention_bias="blk.0.attn_q.bias" in model.tensors)


def _qwen3_moe(model: _Source, config: dict[str, Any]) -> dict[str, Any]:
    experts = dict(num_experts=model.whole("expert_count"), num_experts_per_tok=model.whole("expert_used_count"))
    size = model.whole("expert_feed_forward_length", default=config["intermediate_size"])
    return _qwen3(model, config) | experts | dict(moe_intermediate_size=size, norm_topk_prob=True)  # as llama.cpp always does


def _gemma(model: _Source, config: dict[str, Any]) -> dict[str, Any]:
    """Returns what Gemma 2 and 3 share; the 27B models scale queries by the width of a head in the hidden vector."""
    of_width = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[model.architecture]
    size = config["hidden_size"] // config["num_attention_heads"] if of_width else config["head_dim"]
    caps = {name: model.number(name, default=None) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    return dict(query_pre_attn_scalar=size) | caps


def _gemma2(model: _Source, config: dict[str, Any]) -> dict[str, Any]:
    fields = _gemma(model, config)
    defaults = dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    fields |= dict(sliding_window=model.whole("attention.sliding_window", default=4096))
    return fields | {name: fields[name] or default for name, default in defaults.items()} | _pattern(model, config, 2)


def _gemma3(model: _Source, config: dict[str, Any]) -> dict[str, Any]:
    local = dict(rope_type="default", rope_theta=model.number("rope.freq_base_swa", default=1e4))  # in few files
    ropes = dict(full_attention=config["rope_parameters"], sliding_attention=local)
    window, pattern = model.whole("attention.sliding_window", least=0, default=0), _pattern(model, config, 6)
    if not window:  # then no layer slides, as in llama.cpp
        pattern = dict(layer_types=["full_attention"] * len(pattern["layer_types"]))
    return _gemma(model, config) | dict(rope_parameters=ropes, sliding_window=window or None) | pattern


def _gpt_oss(model: _Source, config: dict[str, Any]) -> dict[str, Any]:
    size = model.whole("expert_feed_forward_length", default=config["intermediate_size"])
    experts = dict(num_local_experts=model.whole("expert_count"), num_experts_per_tok=model.whole("expert_used_count"))
    rope = config["rope_parameters"] | ({"truncate": False} if config["rope_parameters"]["rope_type"] == "yarn" else {})
    window = dict(sliding_window=model.whole("attention.sliding_window", default=128))
    return experts | window | dict(intermediate_size=size, rope_parameters=rope) | _pattern(model, config, 2)


def _phi3(model: _Source, config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"] | {"partial_rotary_factor": config["rotated"] / config["head_dim"]}
    original = model.whole("rope.scaling.original_context_length", default=config["max_position_embeddings"])
    window = model.whole("attention.sliding_window", least=0, default=0)
    fields = dict(sliding_window=window or None, original_max_position_embeddings=original, rope_parameters=rope)
    return fields


def _pattern(model: _Source, config: dict[str, Any], period: int) -> dict[str, Any]:
    """Returns the layers' types: each `period`-th is full, the others slide; a file may give the period or a list."""
    count, key = config["num_hidden_layers"], f"{model.architecture}.attention.sliding_window_pattern"
    given = model.fields.raw.get(key)
    if isinstance(given, np.ndarray):
        model.fields.taken.add(key)
        slides = [bool(slide) for slide in given]
    else:
        period = model.whole("attention.sliding_window_pattern", default=period)
        slides = [bool((i + 1) % period) for i in range(min(count, 2**10))]
    return dict(layer_types=["sliding_attention" if slide else "full_attention" for slide in slides])


def _tell_others(model: _Source) -> None:
    """Logs the names of the architecture's values that were not read."""
    prefix = f"{model.architecture}."
    names = {name.removeprefix(prefix) for name in model.fields.others() if name.startswith(prefix)} - {*IRRELEVANT}
    if names:
        LOG.warning("%s: %s not read", model.fields.source, listed([quoted(f"{prefix}{name}") for name in sorted(names)]))


def _nothing(model: _Source, config: dict[str, Any]) -> dict[str, Any]:
    return {}


# GGUF's architecture -> Hugging Face's model type, and the function that adds the fields of the family.
ARCHITECTURES = {
    "llama": ("llama", _llama),
    "mistral": ("mistral", _llama),
    "qwen2": ("qwen2", _nothing),
    "qwen3": ("qwen3", _qwen3),
    "qwen3moe": ("qwen3_moe", _qwen3_moe),
    "gemma2": ("gemma2", _gemma2),
    "gemma3": ("gemma3_text", _gemma3),
    "phi3": ("phi3", _phi3),
    "gpt-oss": ("gpt_oss", _gpt_oss),
}
