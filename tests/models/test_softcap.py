"""Scores with a soft cap, as Gemma 2 has them: a model whose layers are given one has the logits of transformers' own form.

With a policy of every base; test_policies has a single layer with all of them.
"""

import dataclasses

import numpy as np
import pytest
import torch
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.qwen3 import modeling_qwen3

from icejax.config import ModelConfig
from tests import tolerances
from tests.helpers import families
from tests.helpers.policies import OF_BASES
from tests.helpers.run import follows

CAPS = (2.0, 1.0, None)  # of a sliding, a full and a sliding layer
PROMPT, DECODED, EXTENDED = 133, 20, 40
BY_DEFAULT = ("quest", "snapkv")  # over pages, and over what stays on the device


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Returns the model as icejax has it, and transformers' logits of some tokens, with caps or without."""
    layers = ModelConfig.layers.fget

    def with_caps(config):
        return tuple(dataclasses.replace(x, softcap=cap) for x, cap in zip(layers(config), CAPS, strict=True))

    theirs = families.build(families.row("qwen3-layer-types"))
    monkeypatch.setattr(ModelConfig, "layers", property(with_caps))

    @torch.no_grad()
    def logits(tokens, caps=CAPS):
        def attend(module, *arrays, **options):
            return modeling_gemma2.eager_attention_forward(module, *arrays, **options, softcap=caps[module.layer_idx])

        monkeypatch.setattr(modeling_qwen3, "eager_attention_forward", attend)
        return theirs(torch.tensor([tokens])).logits[0].numpy()

    return families.load(theirs, tmp_path), logits


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=str(row), marks=() if row.name in BY_DEFAULT else pytest.mark.slow) for row in OF_BASES]
)
def test_prefill_decode_and_extend_equal_transformers(models, row):
    ours, theirs = models
    tokens = families.tokens(PROMPT + 2 * DECODED + EXTENDED)
    expected, without = theirs(tokens), theirs(tokens, (None,) * 3)
    assert np.abs(expected - without).max() > 1000 * tolerances.LOGITS
    follows(ours, row.exact(len(tokens)), tokens, expected, prompt=PROMPT, decoded=DECODED)
