"""YaRN put into a config as Qwen's cards say: texts longer than `max_position_embeddings` equal transformers'."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import icejax
from icejax.cache.registry import Full
from icejax.checkpoint import load_model
from tests.helpers import families
from tests.helpers.letters import Letters

PROMPT, NEW = "abcdefghijklmnopqrst" * 5, 12


@pytest.mark.slow
def test_a_text_beyond_the_trained_context_equals_transformers(tmp_path):
    families.save(families.build(families.row("qwen2-tied"), num_hidden_layers=2, max_position_embeddings=64), tmp_path)
    card = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    families.edit_config(tmp_path, rope_parameters=..., rope_theta=1e4, rope_scaling=card)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = Letters()(PROMPT)["input_ids"]
    with torch.no_grad():
        expected = theirs.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0, len(ids) :].tolist()
    (reply,) = icejax.generate(load_model(tmp_path), Letters(), PROMPT, cache=Full(), max_new_tokens=NEW)
    assert len(ids) > 64 and reply.token_ids == tuple(expected)
