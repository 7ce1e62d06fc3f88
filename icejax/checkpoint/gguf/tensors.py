"""The tensors of a GGUF model under Hugging Face's names, in its order of rows, and with its meaning of norms.

`icejax.checkpoint.readers.gguf` calls it. A matrix is [O, I] in both; GGUF holds the matrices of all experts in one tensor
[E, O, I].

Example, a head of 4 dimensions: `llama` files hold its rows as 0 2 1 3 (the two halves of RoPE interleaved), and here they are
0 1 2 3 again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from icejax.checkpoint.gguf.config import FREQUENCIES, LONG, SHORT
from icejax.checkpoint.gguf.metadata import Tensor
from icejax.checks.errors import InputError

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
NORMS_ON_BOTH_SIDES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Names of a model type that differ from `BLOCK`.
OTHERS = {
    "gemma2": NORMS_ON_BOTH_SIDES,
    "gemma3_text": NORMS_ON_BOTH_SIDES,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gpt_oss": {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
NAME = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)|(\w+)\.(weight|bias)")
UNUSED = {FREQUENCIES, LONG, SHORT}  # they are in the config
PERMUTED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


@dataclass(frozen=True)
class Mapped:
    """A tensor under its Hugging Face name.

    Attributes:
        key: its name.
        shape: its shape.
        stored: the GGUF tensors that it is made of: one, or two whose rows alternate.
        expert: the expert whose matrix it is; None: the whole tensor.
        heads: number of heads whose interleaved rows are put in order; 0: the rows are in order.
        less: number to subtract, 1 of Gemma's norms.
        turned: whether the matrices of all experts [E, O, I] are [E, I, O] here.
    """

    key: str
    shape: tuple[int, ...]
    stored: tuple[Tensor, ...]
    expert: int | None = None
    heads: int = 0
    less: int = 0
    turned: bool = False

    @property
    def plain(self) -> bool:
        """Whether its rows are those of one stored tensor."""
        return len(self.stored) == 1 and not self.turned


def mapped(raw: dict[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Mapped]:
    """Yields the tensors of a GGUF model under Hugging Face's names; a tensor of an unknown name keeps its name.

    Args:
        raw: the model's config.json.
        tensors: GGUF's tensors by name.
    """
    kind = raw["model_type"]
    names, gemma = BLOCK | OTHERS.get(kind, {}), kind.startswith("gemma")
    for name, tensor in tensors.items():
        match = NAME.fullmatch(name)
        layer, module, suffix, top, top_suffix = match.groups() if match is not None else (None,) * 5
        if name in UNUSED:
            continue
        if top in TOP:
            less = int(gemma and top == "output_norm")
            yield Mapped(f"{TOP[top]}.{top_suffix}", tensor.shape, (tensor,), less=less)
        elif module in EXPERTS and tensor.shape[0] == raw.get("num_local_experts", raw.get("num_experts")):
            path = f"model.layers.{layer}.mlp.experts"
            yield from (_fused if kind == "gpt_oss" else _experts)(path, layer, module, suffix, tensors)
        elif module in names:
            key = f"model.layers.{layer}.{names[module]}" + ("" if module == "attn_sinks" else f".{suffix}")
            heads = _heads(raw, tensor, module) if kind in ("llama", "mistral") else 0
            yield Mapped(key, tensor.shape, (tensor,), heads=heads, less=int(gemma and module.endswith("norm")))
        else:
            yield Mapped(name, tensor.shape, (tensor,))


def _heads(raw: dict[str, Any], tensor: Tensor, module: str) -> int:
    """Returns the number of heads whose rows are interleaved in a tensor of a `llama` file; 0: none are, or they do not fit."""
    if module not in PERMUTED:
        return 0
    heads = raw.get(PERMUTED[module])
    if not isinstance(heads, int):
        raise InputError(f"config.json has no {PERMUTED[module]!r}: remove its folder and give the GGUF file, to make it again")
    return heads if heads and tensor.shape[0] % (2 * heads) == 0 else 0


def _experts(path: str, layer: str, module: str, suffix: str, tensors: Mapping[str, Tensor]) -> Iterator[Mapped]:
    """Yields each expert's matrix (or bias) under its own name."""
    tensor = tensors[f"blk.{layer}.{module}.{suffix}"]
    for i in range(tensor.shape[0]):
        yield Mapped(f"{path}.{i}.{EXPERTS[module]}.{suffix}", tensor.shape[1:], (tensor,), expert=i)


def _fused(path: str, layer: str, module: str, suffix: str, tensors: Mapping[str, Tensor]) -> Iterator[Mapped]:
    """Yields gpt-oss's tensors of all experts: `down_proj`, and `gate_up_proj`, in which gates and ups alternate."""
    tensor = tensors[f"blk.{layer}.{module}.{suffix}"]
    end, turned = ("" if suffix == "weight" else f"_{suffix}"), len(tensor.shape) == 3
    shape = (tensor.shape[0], *tensor.shape[:0:-1])
    if module == "ffn_down_exps":
        yield Mapped(f"{path}.down_proj{end}", shape, (tensor,), turned=turned)
    up = tensors.get(f"blk.{layer}.ffn_up_exps.{suffix}")
    if module == "ffn_gate_exps" and up is not None and up.shape == tensor.shape:
        yield Mapped(f"{path}.gate_up_proj{end}", (*shape[:-1], 2 * shape[-1]), (tensor, up), turned=turned)
