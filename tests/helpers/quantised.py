"""Writes tiny checkpoints in every layout of quantised weights, and reads their matrices back bit by bit in plain numpy.

The reference for icejax's readers of quantised checkpoints: `save` writes a folder, and returns the weights it encodes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from icejax.ops.quantized.products import Grouped

Tensors = dict[str, torch.Tensor]
UNQUANTISED = ("model.embed_tokens.weight", "lm_head.weight", ".gate.weight")


@dataclass(frozen=True)
class Format:
    """A layout: its `quantization_config`, encoder and decoder of a matrix, and relative error on Gaussian weights."""

    config: dict
    write: Callable[[np.ndarray], Tensors]
    read: Callable[[Tensors, tuple[int, int]], np.ndarray]
    error: float


def steps(w: np.ndarray, rows: int, columns: int, *, lowest: int, highest: int, symmetric: bool):
    """Returns the integer codes of a matrix, and the scale and zero point of each block of `rows` x `columns`."""
    down, across = -(-w.shape[0] // rows), -(-w.shape[1] // columns)
    codes, scale, zero = np.zeros(w.shape, int), np.zeros((down, across), np.float32), np.zeros((down, across), int)
    for r in range(down):
        for c in range(across):
            block = (slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns))
            low, high = min(w[block].min(), 0), max(w[block].max(), 0)
            scale[r, c] = max(-low, high) / highest if symmetric else (high - low) / (highest - lowest)
            zero[r, c] = 0 if symmetric else np.clip(lowest - np.round(low / scale[r, c]), lowest, highest)
            codes[block] = np.clip(np.round(w[block] / scale[r, c]) + zero[r, c], lowest, highest)
    return codes, scale, zero


def pack(codes: np.ndarray, bits: int, order: tuple[int, ...]) -> torch.Tensor:
    """Returns unsigned codes [A, C] as words i32[A, C bits / 32]: nibble n of a word is column order[n]."""
    codes_per_word = 32 // bits
    words = np.zeros((codes.shape[0], -(-codes.shape[1] // codes_per_word)), np.uint64)
    for word in range(words.shape[1]):
        for nibble, column in enumerate(order):
            if codes_per_word * word + column < codes.shape[1]:
                words[:, word] |= codes[:, codes_per_word * word + column].astype(np.uint64) << np.uint64(bits * nibble)
    return torch.tensor(words.astype(np.uint32).view(np.int32))


def bits_at(words: torch.Tensor, index: np.ndarray, bits: int, order: tuple[int, ...]) -> np.ndarray:
    """Returns the unsigned codes of columns `index`, unpacked from words i32[A, W]."""
    codes_per_word, unsigned = 32 // bits, words.numpy().astype(np.int64) & 0xFFFFFFFF
    shift = np.array([bits * order.index(i % codes_per_word) for i in index])
    return (unsigned[:, index // codes_per_word] >> shift) & (2**bits - 1)


def blocked(values: np.ndarray, shape, rows: int, columns: int) -> np.ndarray:
    """Repeats the value of each block for all its elements; returns a matrix of `shape`."""
    return values[np.arange(shape[0])[:, None] // rows, np.arange(shape[1])[None] // columns]


def plain(config: dict, rows: int | None, columns: int | None, *, scale: str, kind: str, error: float, lead=None) -> Format:
    """Returns a layout with one fp8 or int8 code per element; scales have `lead` dimensions, or 2 if None."""

    def sides(shape):
        return rows or shape[0], columns or shape[1]

    def write(w):
        codes, scales, zero = steps(w, *sides(w.shape), lowest=-128, highest=127, symmetric=kind != "asymmetric")
        zeros = {"weight_zero_point": torch.tensor(zero.astype(np.int8))} if kind == "asymmetric" else {}
        if kind == "fp8":
            scales = scales * np.float32(127 / 448)
            stored = torch.tensor(w / blocked(scales, w.shape, *sides(w.shape))).to(torch.float8_e4m3fn)
        else:
            stored = torch.tensor(codes.astype(np.int8))
        return {"weight": stored, scale: torch.tensor(scales if lead is None else scales.reshape(scales.shape[:lead]))} | zeros

    def read(t, shape):
        down, across = (-(-size // side) for size, side in zip(shape, sides(shape), strict=True))
        scales = blocked(t[scale].numpy().reshape(down, across), shape, *sides(shape))
        zero = blocked(t["weight_zero_point"].numpy(), shape, *sides(shape)) if kind == "asymmetric" else 0
        return ((t["weight"].float().numpy() - zero) * scales).astype(np.float32)

    return Format(config, write, read, error)


def compressed(format: str, strategy: str, *, bits: int = 8, type: str = "int", **weights) -> dict:
    """Returns a `quantization_config` with all the fields that the compressed-tensors library writes."""
    group = {
        "input_activations": None, "output_activations": None, "targets": ["Linear"],
        "weights": {"actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": bits,
                    "observer": "minmax", "observer_kwargs": {}, "strategy": strategy, "symmetric": True, "type": type} | weights,
    }  # fmt: skip
    return {
        "config_groups": {"group_0": group}, "format": format, "global_compression_ratio": 1.5, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
    }  # fmt: skip


IN_ORDER = {4: tuple(range(8)), 8: tuple(range(4))}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(bits: int, group: int, *, symmetric: bool, error: float, **weights) -> Format:
    """Returns the packed layout of compressed-tensors: unsigned codes along columns, zero points along rows."""
    offset, order = 2 ** (bits - 1), IN_ORDER[bits]

    def write(w):
        codes, scale, zero = steps(w, 1, group, lowest=-offset, highest=offset - 1, symmetric=symmetric)
        zeros = {} if symmetric else {"weight_zero_point": pack(zero.T + offset, bits, order).T.contiguous()}
        metadata = {"weight_scale": torch.tensor(scale).bfloat16(), "weight_shape": torch.tensor(w.shape)}
        return {"weight_packed": pack(codes + offset, bits, order)} | metadata | zeros

    def read(t, shape):
        codes = bits_at(t["weight_packed"], np.arange(shape[1]), bits, order) - offset
        zero = 0
        if not symmetric:
            zero = blocked(bits_at(t["weight_zero_point"].T, np.arange(shape[0]), bits, order).T - offset, shape, 1, group)
        return ((codes - zero) * blocked(t["weight_scale"].float().numpy(), shape, 1, group)).astype(np.float32)

    strategy = compressed("pack-quantized", "group", bits=bits, group_size=group, symmetric=symmetric, **weights)
    return Format(strategy, write, read, error)


def awq(group: int, *, error: float) -> Format:
    def write(w):
        codes, scale, zero = steps(w, 1, group, lowest=0, highest=15, symmetric=False)
        scales = {"scales": torch.tensor(scale.T.copy()).half()}
        return {"qweight": pack(codes.T, 4, AWQ_ORDER), "qzeros": pack(zero.T, 4, AWQ_ORDER)} | scales

    def read(t, shape):
        columns = np.arange(shape[0])
        codes, zero = (bits_at(t[name], columns, 4, AWQ_ORDER) for name in ("qweight", "qzeros"))
        return ((codes.T - blocked(zero.T, shape, 1, group)) * blocked(t["scales"].float().numpy().T, shape, 1, group)).astype(
            "f4"
        )

    config = dict(bits=4, group_size=group, modules_to_not_convert=None, quant_method="awq", version="gemm", zero_point=True)
    return Format(config, write, read, error)


def gptq(bits: int, group: int, *, version: str, error: float) -> Format:
    order, zero_offset, size = IN_ORDER[bits], version == "gptq", 2**bits

    def write(w):
        codes, scale, zero = steps(w, 1, group, lowest=0, highest=size - 1, symmetric=False)
        index = torch.arange(w.shape[1], dtype=torch.int32) // group
        metadata = {"scales": torch.tensor(scale.T.copy()).half(), "g_idx": index}
        words = pack(codes, bits, order).T.contiguous(), pack((zero.T - zero_offset) % size, bits, order)
        return {"qweight": words[0], "qzeros": words[1]} | metadata

    def read(t, shape):
        codes = bits_at(t["qweight"].T, np.arange(shape[1]), bits, order)
        zero = (bits_at(t["qzeros"], np.arange(shape[0]), bits, order) + zero_offset) % size
        return ((codes - blocked(zero.T, shape, 1, group)) * blocked(t["scales"].float().numpy().T, shape, 1, group)).astype(
            "f4"
        )

    config = dict(bits=bits, group_size=group, desc_act=False, sym=False, quant_method="gptq", checkpoint_format=version)
    return Format(config | dict(damp_percent=0.1, true_sequential=True, dynamic=None), write, read, error)


def fp8(block: list[int] | None) -> Format:
    config = dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=block)
    sides = block or (None, None)
    return plain(config, *sides, scale="weight_scale_inv", kind="fp8", error=0.026, lead=None if block else 0)


def floats(strategy: str, rows: int | None, columns: int | None, **weights) -> Format:
    config = compressed("float-quantized", strategy, type="float", **weights)
    return plain(config, rows, columns, scale="weight_scale", kind="fp8", error=0.026)


def ints(strategy: str, rows: int | None, kind: str, lead: int | None = None) -> Format:
    config = compressed("int-quantized", strategy, symmetric=kind != "asymmetric")
    return plain(config, rows, None, scale="weight_scale", kind=kind, error=0.008, lead=lead)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # indexed by code


def fp4(format: str, group: int, *, error: float) -> Format:
    """Returns an fp4 layout, two codes per byte: nvfp4 has e4m3 scales and one global scale, mxfp4 powers of two."""
    is_nvfp4 = format.startswith("nv")

    def write(w):
        group_max = np.abs(w).reshape(len(w), -1, group).max(-1)
        if is_nvfp4:
            global_scale = np.float32(6 * 448 / group_max.max())
            scale = torch.tensor(group_max / 6 * global_scale).to(torch.float8_e4m3fn)
            scales, extra = scale.float().numpy() / global_scale, {"weight_global_scale": torch.tensor([global_scale])}
        else:
            exponents = np.floor(np.log2(group_max)).astype(int) - 2
            scales, scale, extra = 2.0**exponents, torch.tensor((exponents + 127).astype(np.uint8)), {}
        codes = np.abs((w / blocked(scales, w.shape, 1, group))[..., None] - E2M1).argmin(-1).astype(np.uint8)
        return {"weight_packed": torch.tensor(codes[:, ::2] | codes[:, 1::2] << 4), "weight_scale": scale} | extra

    def read(t, shape):
        index = np.arange(shape[1])
        codes = E2M1[(t["weight_packed"].numpy()[:, index // 2] >> (index % 2 * 4)) & 15]
        scales = t["weight_scale"].float().numpy() / t["weight_global_scale"].numpy() if is_nvfp4 else None
        return (
            codes * blocked(2.0 ** (t["weight_scale"].numpy() - 127.0) if scales is None else scales, shape, 1, group)
        ).astype("f4")

    weights = dict(group_size=group, scale_dtype="torch.float8_e4m3fn" if is_nvfp4 else "torch.uint8", zp_dtype=None)
    strategy = "tensor_group" if is_nvfp4 else "group"
    return Format(compressed(f"{format}-pack-quantized", strategy, bits=4, type="float", **weights), write, read, error)


# Errors: relative errors on Gaussian weights. Blocks of 40 columns leave the last block cut short.
FORMATS = {
    "fp8-tensor": fp8(None),
    "fp8-blocks": fp8([32, 40]),
    "float-tensor": floats("tensor", None, None),
    "float-channel": floats("channel", 1, None),
    "float-blocks": floats("block", 48, 32, block_structure=[48, 32]),
    "int-channel": ints("channel", 1, "symmetric"),
    "int-channel-flat": ints("channel", 1, "symmetric", lead=1),
    "int-asymmetric": ints("channel", 1, "asymmetric"),
    "packed-4": packed(4, 32, symmetric=True, error=0.097, actorder="static"),
    "packed-4-asymmetric": packed(4, 32, symmetric=False, error=0.097),
    "nvfp4": fp4("nvfp4", 8, error=0.098),
    "mxfp4": fp4("mxfp4", 8, error=0.115),
    "packed-8": packed(8, 32, symmetric=True, error=0.008),
    "awq": awq(32, error=0.097),
    "gptq": gptq(4, 32, version="gptq", error=0.097),
    "gptq-v2": gptq(4, 32, version="gptq_v2", error=0.097),
    "gptq-8": gptq(8, 32, version="gptq", error=0.008),
}


def save(model: PreTrainedModel, folder: Path, format: Format) -> dict[str, np.ndarray]:
    """Writes `model` to `folder` in this format; returns the weights that its quantised matrices decode to."""
    model.save_pretrained(folder)
    stored, weights = {}, {}
    for key, tensor in load_file(
        folder / "model.safetensors"
    ).items():  # the file has one tensor per expert, the model does not
        if tensor.ndim == 2 and not key.endswith(UNQUANTISED):
            parts = format.write(tensor.numpy())
            weights[key] = format.read(parts, tuple(tensor.shape))
            stored |= {f"{key.removesuffix('.weight')}.{name}": part for name, part in parts.items()}
        else:
            stored[key] = tensor
    save_file(stored, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": format.config}
    (folder / "config.json").write_text(json.dumps(raw))
    return weights


def write_plain(quantised: Path, weights: dict[str, np.ndarray], folder: Path) -> Path:
    """Copies the folder `quantised` to `folder`, its codes replaced by the `weights` that `save` returned; returns `folder`."""
    shutil.copytree(quantised, folder)
    coded = {key.removesuffix("weight") for key in weights}
    stored = load_file(folder / "model.safetensors")
    unquantised = {key: x for key, x in stored.items() if key.endswith("bias") or key[: key.rfind(".") + 1] not in coded}
    save_file(unquantised | {key: torch.tensor(x) for key, x in weights.items()}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def dense(weight: jax.Array | Grouped, dtype: str = "float32") -> np.ndarray:
    """Returns a loaded matrix [..., O, I], which may be codes, as numbers of `dtype`."""
    if not isinstance(weight, Grouped):
        return np.asarray(weight)
    groups = np.asarray(weight.weights(dtype))
    groups = groups if weight.by_row else np.moveaxis(groups, -3, -2)
    return groups.reshape(*groups.shape[:-2], -1)
