"""Writes tiny Hugging Face models as GGUF files, with the `gguf` package's own writer and its own table of tensor names.

The reference for icejax's reader of GGUF. Values, order of rows and norms are those of llama.cpp's converter.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import gguf
import numpy as np
import transformers as hf
from gguf import quants
from gguf.constants import GGMLQuantizationType

from icejax.checkpoint.gguf import tokenizer_files

# Hugging Face's model type -> llama.cpp's architecture, where the names differ.
ARCHITECTURES = {"mistral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss"}
NO_TOKENIZER = {"tokenizer_config.json": "{}"}
# Type -> places of float16 numbers in a block.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (), "Q2_K": (80, 82), "Q3_K": (108,), "IQ3_S": (0,), "IQ2_XXS": (0,),
}  # fmt: skip


def without_tokenizers(monkeypatch) -> None:
    """Makes GGUF files' tokenizers those of `NO_TOKENIZER`: the tests of weights write no vocabulary."""
    monkeypatch.setattr(tokenizer_files, "tokenizer_files", lambda values: NO_TOKENIZER)


def write(
    model: hf.PreTrainedModel,
    file: Path,
    kind: str = "F32",
    *,
    leave_out: tuple[str, ...] = (),
    vocabulary: dict | None = None,
    **changes,
) -> Path:
    """Writes `model` as a GGUF file, matrices in type `kind`, and gives the model the weights that the file then holds.

    Args:
        kind: type of the matrices whose rows its blocks divide; others stay float32. Of a type that the package does not
            quantise the blocks are random, of the matrix's deviation.
        vocabulary: values of a tokenizer and its chat template, by key; None: the file has no tokenizer.
        leave_out: values that the file does not have, without the architecture's prefix.
        changes: values with the architecture's prefix, to add or to replace.
    """
    import torch

    config = model.config
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(file, arch)
    values = _values(config) | {name.replace("__", "."): value for name, value in changes.items()}
    for name, value in values.items():
        if name not in leave_out and value is not None:
            _add(writer, f"{arch}.{name}", value)
    for key, value in (vocabulary or {"tokenizer.ggml.eos_token_id": config.eos_token_id or 2}).items():
        if key != "general.architecture":
            _add(writer, key, value)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for key, parameter in model.state_dict().items():
        if config.tie_word_embeddings and key == "lm_head.weight":
            continue
        numbers, stored_in = parameter.float().numpy(), GGMLQuantizationType.F32
        if numbers.ndim > 1 and not key.endswith("bias") and "router" not in key and "mlp.gate.weight" not in key:
            turned = config.model_type == "gpt_oss" and key.endswith("_proj") and numbers.ndim == 3  # [E, I, O]
            blocks, stored_in = _coded(numbers.swapaxes(1, 2) if turned else numbers, kind)
            held = quants.dequantize(blocks, stored_in)
            numbers, held = (x.swapaxes(1, 2) if turned else x for x in (blocks, held))
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(held))
        for name, part in _stored(config, names, key, numbers):
            writer.add_tensor(name, np.ascontiguousarray(part), raw_dtype=stored_in)
    for name, vector in _rope_tensors(config):
        writer.add_tensor(name, np.array(vector, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)


def random_blocks(kind: str, shape: tuple[int, ...], *, factor: float = 1.0, seed: int = 0) -> np.ndarray:
    """Returns the blocks u8[..., bytes of a row] of a matrix of any codes, whose float16 numbers are normal times a factor."""
    rng, (block, size) = np.random.default_rng(seed), gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (math.prod(shape) // block, size), np.uint8)
    for at in HALVES[kind]:
        blocks[:, at : at + 2] = (factor * rng.standard_normal((len(blocks), 1))).astype("<f2").view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _coded(numbers: np.ndarray, kind: str) -> tuple[np.ndarray, GGMLQuantizationType]:
    """Returns the rows of a matrix in a type, and the type; float32 where its blocks do not divide the rows."""
    number = GGMLQuantizationType[kind]
    if numbers.shape[-1] % gguf.GGML_QUANT_SIZES[number][0]:
        return numbers, GGMLQuantizationType.F32
    try:
        return quants.quantize(numbers, number), number
    except NotImplementedError:
        form = dict(shape=numbers.shape, seed=zlib.crc32(np.ascontiguousarray(numbers)))
        factor = numbers.std() / quants.dequantize(random_blocks(kind, **form), number).std()
        return random_blocks(kind, factor=factor, **form), number


def _values(config: hf.PreTrainedConfig) -> dict:
    """Returns the values of a config, without the architecture's prefix."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "expert_count": getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "attention.sliding_window": getattr(config, "sliding_window", None) or None,
    }
    if values["expert_count"]:
        values["expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] in ("yarn", "longrope"):
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "longrope":
        scale = config.max_position_embeddings / rope["original_max_position_embeddings"]
        strength = math.sqrt(1 + math.log(scale) / math.log(rope["original_max_position_embeddings"]))
        values["rope.scaling.attn_factor"] = strength
    if config.model_type == "gemma3_text":
        values["rope.freq_base_swa"] = config.rope_parameters["sliding_attention"]["rope_theta"]
    return values


def _stored(config, names: gguf.TensorNameMap, key: str, numbers: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Returns the GGUF tensors of a parameter, by name."""
    layer = key.split(".")[2] if ".layers." in key else ""
    if ".mlp.experts." in key:
        end = ".bias" if key.endswith("_bias") else ".weight"
        if config.model_type == "gpt_oss":
            numbers = numbers if end == ".bias" else numbers.swapaxes(1, 2)
            parts = (numbers[:, ::2], numbers[:, 1::2]) if "gate_up" in key else (numbers,)
        else:
            parts = np.split(numbers, 2, axis=1) if "gate_up" in key else (numbers,)
        modules = ("gate", "up") if "gate_up" in key else ("down",)
        return [(f"blk.{layer}.ffn_{name}_exps{end}", part) for name, part in zip(modules, parts, strict=True)]
    if "sinks" in key:
        key += ".weight"
    if config.model_type.startswith("gemma") and "norm" in key:
        numbers = numbers + 1
    if config.model_type in ("llama", "mistral") and (".q_proj" in key or ".k_proj" in key):
        heads = config.num_attention_heads if ".q_proj" in key else config.num_key_value_heads
        halves = numbers.reshape(heads, 2, len(numbers) // heads // 2, *numbers.shape[1:])
        numbers = halves.swapaxes(1, 2).reshape(numbers.shape)
    name = names.get_name(key, try_suffixes=(".weight", ".bias"))
    assert name is not None, key
    return [(name, numbers)]


def _rope_tensors(config) -> list[tuple[str, list[float]]]:
    """Returns the tensors of RoPE: Llama 3.1's divisors of its frequencies, and LongRoPE's factors."""
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if rope["rope_type"] == "longrope":
        return [("rope_factors_long.weight", rope["long_factor"]), ("rope_factors_short.weight", rope["short_factor"])]
    if rope["rope_type"] != "llama3":
        return []
    low, high = (rope["original_max_position_embeddings"] / rope[f"{name}_freq_factor"] for name in ("low", "high"))
    divisors = []
    for i in range(0, config.head_dim, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (i / config.head_dim)
        smooth = (rope["original_max_position_embeddings"] / length - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        divisors.append(1.0 if length < high else rope["factor"] if length > low else between)
    return [("rope_freqs.weight", divisors)]
