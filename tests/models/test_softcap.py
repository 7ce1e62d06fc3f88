"""Soft-capped scores, as in Gemma 2: logits of a model with caps added equal transformers', with one policy of every base.

test_policies checks a single layer with every policy.
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

CAPS = (2.0, 1.0, None)  # for a sliding, a full and a sliding layer
PROMPT, DECODED, EXTENDED = 133, 20, 40


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Returns the icejax model, and a function that computes transformers' logits of tokens with given caps."""
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


@pytest.mark.slow
@pytest.mark.parametrize("row", OF_BASES, ids=str)
def test_prefill_decode_and_extend_equal_transformers(models, row):
    ours, theirs = models
    tokens = families.tokens(PROMPT + 2 * DECODED + EXTENDED)
    expected, uncapped = theirs(tokens), theirs(tokens, (None,) * 3)
    assert np.abs(expected - uncapped).max() > 1000 * tolerances.LOGITS
    follows(ours, row.exact(len(tokens)), tokens, expected, prompt=PROMPT, decoded=DECODED)
