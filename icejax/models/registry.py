"""The registry of model families by `model_type` of config.json; the checkpoint loader and converter call `family`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from icejax.checks.errors import InputError, quoted
from icejax.config import ModelConfig
from icejax.models.families import (
    deepseek,
    gemma,
    gemma4,
    glm,
    glm4,
    gpt_oss,
    llama,
    minimax,
    mistral,
    mixtral,
    olmo,
    phi,
    qwen,
)
from icejax.models.hf import wrapped
from icejax.models.hf.hf_config import ROTARY_TABLES

GATE_UP = ("gate_proj", "up_proj")
EXPERTS, DENSE = {"experts.gate_up_proj": GATE_UP}, {"mlp.gate_up_proj": GATE_UP}
QKV = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj")}


@dataclass(frozen=True)
class Family:
    """How a family's checkpoints are read.

    Attributes:
        read_config: raw config.json -> ModelConfig.
        ignored_keys: raw config.json -> checkpoint keys that hold no parameter.
        renamed: parts of parameter names that differ in a checkpoint, as pairs (ours, theirs).
        fused: projections that a checkpoint holds in one tensor, row after row: name of the fused module -> our modules. If a
            fused module belongs to experts, the checkpoint holds every matrix of all experts in one tensor.
        turned: whether experts' tensors have swapped axes, and fused rows alternate between projections.
        renamings: alternatives of further renaming, pairs as in `renamed`; a checkpoint uses one of them.
    """

    read_config: Callable[[dict[str, Any]], ModelConfig]
    ignored_keys: Callable[[dict[str, Any]], re.Pattern[str]] = lambda raw: re.compile(ROTARY_TABLES)
    renamed: tuple[tuple[str, str], ...] = ()
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    turned: bool = False
    renamings: tuple[tuple[tuple[str, str], ...], ...] = ((),)


@dataclass(frozen=True)
class Wrapped:
    """How checkpoints of models with images or sound are read, whose text model belongs to a family.

    Attributes:
        text: model_type of the text model if its config has none.
    """

    text: str

    def family(self, raw: dict[str, Any]) -> Family:
        """Returns the family of the text model, set up to read it from the whole model's folder."""
        text_family = family(wrapped.text_of(raw, self.text), alone=True)
        return replace(
            text_family,
            read_config=lambda raw: text_family.read_config(wrapped.text_of(raw, self.text)),
            ignored_keys=lambda raw: wrapped.TOWERS,
            renamings=wrapped.FORMS,
        )


FAMILIES = {
    "llama": Family(llama.read_config),
    "mistral": Family(mistral.read_config),
    "ministral": Family(mistral.read_config),
    "ministral3": Family(mistral.read_ministral3_config),
    "mistral3": Wrapped("mistral"),
    "mistral4": Family(mistral.read_mistral4_config, renamed=deepseek.RENAMED, fused=EXPERTS),
    "mixtral": Family(mixtral.read_config, renamed=mixtral.RENAMED),
    "qwen2": Family(qwen.read_qwen2_config),
    "qwen2_moe": Family(qwen.read_qwen2_moe_config),
    "qwen3": Family(qwen.read_qwen3_config),
    "qwen3_moe": Family(qwen.read_qwen3_moe_config),
    "gemma2": Family(gemma.read_gemma2_config, renamed=gemma.RENAMED),
    "gemma3": Wrapped("gemma3_text"),
    "gemma3_text": Family(gemma.read_config, renamed=gemma.RENAMED),
    "gemma4": Wrapped("gemma4_text"),
    "gemma4_text": Family(gemma4.read_config, renamed=gemma4.RENAMED, fused=EXPERTS),
    "glm4": Family(glm4.read_config, fused=DENSE),
    "gpt_oss": Family(gpt_oss.read_config, renamed=gpt_oss.RENAMED, fused=EXPERTS, turned=True),
    "olmo2": Family(olmo.read_olmo2_config, renamed=olmo.RENAMED),
    "olmo3": Family(olmo.read_olmo3_config, renamed=olmo.RENAMED),
    "phi3": Family(phi.read_config, fused=QKV | DENSE),
    "deepseek_v2": Family(deepseek.read_v2_config, renamed=deepseek.RENAMED),
    "deepseek_v3": Family(deepseek.read_v3_config, deepseek.ignored_keys, deepseek.RENAMED),
    "kimi_k2": Family(deepseek.read_v3_config, deepseek.ignored_keys, deepseek.RENAMED),
    "glm4_moe": Family(glm.read_config, deepseek.ignored_keys, deepseek.RENAMED),
    "glm4_moe_lite": Family(glm.read_lite_config, deepseek.ignored_keys, deepseek.RENAMED),
    "minimax_m2": Family(minimax.read_config, renamed=minimax.RENAMED),
}


def family(raw: dict[str, Any], *, alone: bool = False) -> Family:
    """Returns the family of a raw config.json, or of the text model in it.

    Args:
        alone: whether `raw` is the config of a text model, which may not contain another.

    Raises:
        InputError: model_type is missing or not supported, or the text model is missing.
    """
    known = ", ".join(FAMILIES)
    if "model_type" not in raw:
        raise InputError(f"config.json has no 'model_type': expected one of {known}")
    if not isinstance(raw["model_type"], str) or raw["model_type"] not in FAMILIES:
        raise InputError(f"config.json: model_type {quoted(raw['model_type'])} is not supported: expected one of {known}")
    entry = FAMILIES[raw["model_type"]]
    if alone and isinstance(entry, Wrapped):
        raise InputError(
            f"config.json: text_config is of {raw['model_type']}, which contains another text model: pass the inner config"
        )
    return entry.family(raw) if isinstance(entry, Wrapped) else entry
