"""Tiny random Hugging Face models of every row, how to build and load them, and which of them run by default."""

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


def by_family() -> list:
    """Returns the rows as parameters of a test, of which by default the first of every family runs, if it does at all scales."""
    first = {each.model: each for each in reversed(FAMILIES) if each.scales == SCALES}
    return [pytest.param(x, id=str(x), marks=() if first.get(x.model) is x else pytest.mark.slow) for x in FAMILIES]


def by_scale(rows: Sequence[Row] = FAMILIES) -> list:
    """Returns rows and scales as parameters of a test."""
    every = [(row, scale) for row in rows for scale in SCALES]
    return [pytest.param(x, y, id=f"{x}-{y}", marks=() if y in x.scales else pytest.mark.slow) for x, y in every]


def row(name: str) -> Row:
    """Returns the row of that name."""
    return next(r for r in FAMILIES if r.name == name)


def build(row: Row, scale: str = "fan_in", **changes) -> hf.PreTrainedModel:
    """Returns a tiny random model. `default`: matrices of Hugging Face's init; `fan_in`: of standard deviation fan_in^-1/2.

    Norms and biases, which Hugging Face leaves at 1 and 0, are random in both, or they would not be tested; of buffers those
    that a router adds, or that an output is multiplied by.
    """
    import torch  # here, so that a module whose other tests need no PyTorch is collected without it

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
    """Returns `model` as icejax loads it from a folder."""
    return icejax.checkpoint.load_model(save(model, folder))


def edit_config(folder: Path, **changes) -> None:
    """Changes fields of config.json; ... removes one."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in raw.items() if value is not ...}))


def tokens(count: int, *, seed: int = 0) -> list[int]:
    """Returns random token ids."""
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], count).tolist()
