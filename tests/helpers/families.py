"""Builds, saves and loads a tiny random Hugging Face model for each row of `family_rows`; turns rows into test parameters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import transformers as hf

import icejax.checkpoint
from icejax.models.decoder import CausalLM
from tests.helpers.family_rows import FAMILIES, SCALES, SIZES, Row

NOT_SLOW = ("llama-gqa", "mistral-window", "qwen2-plain", "qwen3-plain", "qwen2_moe-plain", "glm4_moe-plain")
BOTH_SCALES = ("llama-gqa", "qwen2_moe-plain", "glm4_moe-plain")


def by_family() -> list:
    """Returns the rows as test parameters; one of each kind of layer is not slow."""
    return [pytest.param(row, id=str(row), marks=() if row.name in NOT_SLOW else pytest.mark.slow) for row in FAMILIES]


def by_scale(rows: Sequence[Row] = FAMILIES) -> list:
    """Returns every row at every scale as test parameters; a scale that the row does not list is slow.

    So is Hugging Face's scale, at which attention is nearly even, but for a row of each kind of layer.
    """
    pairs = [(row, scale) for row in rows for scale in SCALES]
    slow = [scale not in row.scales or scale == "default" and row.name not in BOTH_SCALES for row, scale in pairs]
    return [
        pytest.param(row, scale, id=f"{row}-{scale}", marks=pytest.mark.slow if is_slow else ())
        for (row, scale), is_slow in zip(pairs, slow, strict=True)
    ]


def row(name: str) -> Row:
    """Returns the row called `name`."""
    return next(r for r in FAMILIES if r.name == name)


def build(row: Row, scale: str = "fan_in", **changes) -> hf.PreTrainedModel:
    """Returns a tiny random model with the matrices of Hugging Face's init (`default`) or of standard deviation fan_in^-1/2.

    Norms and biases are random at both scales: at Hugging Face's 1 and 0 a test would not see them. So are two buffers, the
    router's correction bias and the layer's output scale.
    """
    import torch  # imported here, so that test modules are collected without PyTorch

    torch.manual_seed(0)
    model = row.model(row.config(**SIZES | dict(row.changes) | changes, attn_implementation="eager")).eval()
    buffers = (x for x in model.named_buffers() if x[0].endswith(("e_score_correction_bias", "layer_scalar")))
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *buffers):
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.1 + (0.0 if name.endswith("bias") else 1.0))
            elif scale == "fan_in":
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


def save(model: hf.PreTrainedModel, folder: Path) -> Path:
    """Writes `model` as a Hugging Face folder."""
    model.save_pretrained(folder)
    return folder


def load(model: hf.PreTrainedModel, folder: Path) -> CausalLM:
    """Returns `model`, saved to `folder` and loaded by icejax."""
    return icejax.checkpoint.load_model(save(model, folder))


def edit_config(folder: Path, **changes) -> None:
    """Changes fields of config.json; the value `...` removes a field."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in raw.items() if value is not ...}))


def remove_eos(folder: Path) -> None:
    """Leaves a copy of the bundled model without an eos: answers end at the token limit alone."""
    (folder / "generation_config.json").unlink()
    edit_config(folder, eos_token_id=None)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token": None}))


def tokens(count: int, *, seed: int = 0) -> list[int]:
    """Returns `count` random token ids."""
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], count).tolist()
