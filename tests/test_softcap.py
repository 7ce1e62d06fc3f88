"""Scores with a soft cap, as Gemma 2 has them: a model whose layers are given one has the logits of transformers' own form."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.qwen3 import modeling_qwen3

from icejax import inference
from icejax.config import ModelConfig
from icejax.decoding import Decoding
from tests import families, tolerances
from tests.policies import EXACT
from tests.run import all_logits, plan_for

CAPS = (2.0, 1.0, None)  # of a sliding, a full and a sliding layer
PROMPT, DECODED, EXTENDED = 133, 20, 40
BY_DEFAULT = ("full", "clustered", "quest", "snapkv")  # one of every way to attend


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
    "row", [pytest.param(row, id=str(row), marks=() if row.name in BY_DEFAULT else pytest.mark.slow) for row in EXACT]
)
def test_prefill_decode_and_extend_equal_transformers(models, row):
    ours, theirs = models
    tokens = families.tokens(PROMPT + 2 * DECODED + EXTENDED)
    expected, without = theirs(tokens), theirs(tokens, (None,) * 3)
    assert np.abs(expected - without).max() > 1000 * tolerances.LOGITS
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=tolerances.LOGITS)
    policy = row.exact(len(tokens))
    close(all_logits(ours, tokens[:PROMPT], policy), expected[:PROMPT])
    plan = plan_for(ours, policy, [tokens[:PROMPT]], 1000)
    decoding = Decoding(ours, plan)
    state, step, pool = inference.prefill(ours, [tokens[:PROMPT]], plan)
    at = PROMPT
    for more in (EXTENDED, 0):
        close(step.logits[0], expected[at - 1])
        for token in tokens[at : at + DECODED]:
            state = dataclasses.replace(state, last_tokens=jnp.asarray([token], jnp.int32))
            state, step, pool = decoding.step(state, pool)
            close(step.logits[0], expected[at])
            at += 1
        if more:
            assert plan.room_for_answer(more, pages=int(state.cache.lengths.pages)) >= DECODED
            state, step, pool = inference.extend(ours, tokens[at : at + more], plan, state, pool)
            decoding.clock, at = 0, at + more
    assert at == len(tokens)
