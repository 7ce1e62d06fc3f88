"""Models with images or sound: their text model is loaded, under any of the names that its tensors and modules may have."""

import dataclasses
import json
import logging

import jax
import numpy as np
import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from icejax.cache.registry import Full
from icejax.checkpoint import load_model
from icejax.checkpoint.quantized import formats
from icejax.checks.errors import InputError
from icejax.commands import convert, generate
from icejax.models.registry import family
from tests import tolerances
from tests.helpers import families, quantised
from tests.helpers.checkpoints import edit, same_arrays
from tests.helpers.raw_configs import BASE, GEMMA4, read
from tests.helpers.run import all_logits

HUB_PREFIXES = ("language_model.model.", "language_model.lm_head.")
MISTRALS = ("ministral3-plain", "mistral-plain", "mistral4-plain")


def vision(**fields) -> dict:
    """Returns the config of a tiny image tower."""
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    return sizes | fields


def mistral3(name: str, scale: str = "fan_in", *, tied: bool = False) -> Mistral3ForConditionalGeneration:
    """Returns a Mistral with images whose text model is the tiny model of a row."""
    row = families.row(name)
    text = families.SIZES | dict(row.changes) | dict(model_type=row.config.model_type)
    towers = dict(vision_config=vision(model_type="pixtral", head_dim=16), eos_token_id=[1, 2])
    config = Mistral3Config(text_config=text, tie_word_embeddings=tied, attn_implementation="eager", **towers)
    wrapped, text_model = Mistral3ForConditionalGeneration(config).eval(), families.build(row, scale, tie_word_embeddings=tied)
    wrapped.model.language_model.load_state_dict(text_model.model.state_dict())
    wrapped.lm_head.load_state_dict(text_model.lm_head.state_dict())
    return wrapped


@pytest.mark.parametrize(
    "name, scale, tied",
    [
        ("ministral3-plain", "fan_in", True),
        *(pytest.param(name, scale, False, marks=pytest.mark.slow) for name in MISTRALS for scale in families.SCALES),
    ],
)
def test_a_mistral_with_images_has_the_logits_of_its_text_model(name, scale, tied, tmp_path, caplog):
    theirs = mistral3(name, scale, tied=tied)
    families.save(theirs, tmp_path)
    (tmp_path / "generation_config.json").unlink()  # without it, the end marks are config.json's
    with caplog.at_level(logging.INFO, logger="icejax"):
        ours = load_model(tmp_path)
    assert any("hold no parameter and are skipped: multi_modal_projector.linear_1.weight" in x for x in caplog.messages)
    assert (ours.config.tie_word_embeddings, ours.config.eos_token_ids) == (tied, (1, 2))
    prompt = families.tokens(100)
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0].numpy()
    np.testing.assert_allclose(all_logits(ours, prompt, Full()), expected, rtol=0, atol=tolerances.LOGITS)


def rename_tensors(tensors: dict, *names: str) -> None:
    """Replaces the hub's prefixes of tensor names by `names`."""
    for key in list(tensors):
        for old, new in zip(HUB_PREFIXES, names, strict=True):
            if key.startswith(old):
                tensors[new + key.removeprefix(old)] = tensors.pop(key)


@pytest.mark.slow
@pytest.mark.parametrize("names", [("model.language_model.", "lm_head."), ("model.", "lm_head.")])
def test_tensor_names_of_transformers_5_and_of_the_text_model(names, tmp_path):
    expected = load_model(families.save(mistral3("ministral3-plain"), tmp_path))
    edit(tmp_path, lambda tensors: rename_tensors(tensors, *names))
    assert same_arrays(load_model(tmp_path), expected)


@pytest.mark.slow
def test_a_head_that_is_stored_is_its_own_whatever_is_said(tmp_path):
    """`tie_word_embeddings` may be absent, as in Mistral Small 3.1, or true: the stored head is used all the same."""
    expected = load_model(families.save(mistral3("mistral-plain"), tmp_path))
    raw = json.loads((tmp_path / "config.json").read_text())
    for tied in (..., True):
        families.edit_config(tmp_path, tie_word_embeddings=tied, text_config=raw["text_config"] | {"tie_word_embeddings": None})
        model = load_model(tmp_path)
        assert not model.config.tie_word_embeddings and same_arrays(model, expected)
    families.edit_config(tmp_path, tie_word_embeddings=False)
    edit(tmp_path, lambda tensors: tensors.pop("language_model.lm_head.weight"))
    with pytest.raises(InputError, match=r": language_model\.lm_head\.weight is missing$"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["model.language_model.layers.1.mlp", "language_model.model.layers.1.mlp", "layers.1.mlp"])
def test_a_method_may_name_modules_in_any_form(name):
    config, keys = quantised.FORMATS["fp8-blocks"].config | {"modules_to_not_convert": ["model.vision_tower", name]}, {}
    for layer in (0, 1):
        suffix = f"layers.{layer}.mlp.up_proj.weight"
        keys[f"language_model.model.{suffix}"] = [
            f"{prefix}.{suffix}" for prefix in ("language_model.model", "model.language_model", "model")
        ]
    sources = formats.sources({"quantization_config": config}, dict.fromkeys(keys, (64, 64)), names=keys)
    assert [source.layout is None for source in sources.values()] == [False, True]


@pytest.mark.slow
def test_a_quantised_mistral_with_images_is_read_and_converted(tmp_path, capsys):
    """On the hub, `modules_to_not_convert` has the names of transformers' modules, not of the tensors."""
    theirs = mistral3("ministral3-plain")
    weights = quantised.save(theirs, tmp_path / "hf", quantised.FORMATS["fp8-blocks"])
    config = quantised.FORMATS["fp8-blocks"].config | {"modules_to_not_convert": ["model.vision_tower", "lm_head"]}
    families.edit_config(tmp_path / "hf", quantization_config=config)
    model = load_model(tmp_path / "hf", dtype="float32")
    key = "language_model.model.layers.1.mlp.up_proj.weight"
    actual = model.model.layers[1].mlp.up_proj.weight.get_value().weights("float32").reshape(weights[key].shape)
    np.testing.assert_allclose(actual, weights[key], rtol=1e-6, atol=1e-6)
    for source, target in (("hf", "orbax"), ("orbax", "back")):
        assert convert.main([str(tmp_path / source), str(tmp_path / target)], name="icejax convert") == 0
        warned = (
            "tensors that icejax does not use are not copied: multi_modal_projector.linear_1.weight" in capsys.readouterr().err
        )
        assert warned == (source == "hf")
        assert same_arrays(load_model(tmp_path / target, dtype="float32"), model)


def check_text_model(wrapped, text_model, tmp_path):
    """Asserts that a saved model with images is loaded as the same text model saved alone."""
    wrapped.model.language_model.load_state_dict(text_model.model.state_dict())
    loaded = load_model(families.save(wrapped, tmp_path / "whole"))
    expected = families.load(text_model, tmp_path / "alone")
    assert loaded.config == dataclasses.replace(expected.config, eos_token_ids=(106, 7))
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.leaves(x) for x in (loaded, expected)))


def test_a_gemma_4_with_images_is_its_text_model(tmp_path):
    row = families.row("gemma4_text-experts")
    config = Gemma4Config(
        text_config=families.SIZES | dict(row.changes) | dict(eos_token_id=7),
        vision_config=vision(num_key_value_heads=2, head_dim=16),
        eos_token_id=106,
    )
    check_text_model(Gemma4ForConditionalGeneration(config), families.build(row), tmp_path)


@pytest.mark.slow
def test_a_gemma_3_with_images_is_its_text_model(tmp_path):
    row = families.row("gemma3_text-plain")
    text, towers = families.SIZES | dict(row.changes), dict(vision_config=vision(), mm_tokens_per_image=4)
    config = Gemma3Config(text_config=text | dict(eos_token_id=7), eos_token_id=106, **towers)
    check_text_model(Gemma3ForConditionalGeneration(config), families.build(row), tmp_path)


BAD_CONFIGS = {
    "no text model": (dict(text_config=...), "config.json has no 'text_config', which a mistral3 model needs"),
    "another one": (
        dict(text_config={"model_type": "gpt2"}),
        "config.json: model_type 'gpt2' is not supported: expected one of ",
    ),
    "wrapped twice": (
        dict(text_config=dict(model_type="gemma3", text_config={})),
        "config.json: text_config is of gemma3, which contains another text model: pass the inner config\n",
    ),
    "tied to a word": (dict(tie_word_embeddings="yes"), "config.json: 'tie_word_embeddings' must be true or false, got 'yes'"),
}


def test_towers_of_a_published_gemma_4_are_ignored():
    towers = dict(audio_token_id=258881, boa_token_id=256000, eoa_token_id=258883, eoa_token_index=258883)
    towers |= dict(boi_token_id=255999, eoi_token_id=258882, image_token_id=258880, video_token_id=258884)
    raw = dict(
        model_type="gemma4", text_config=BASE | GEMMA4 | dict(hidden_act=None), vision_soft_tokens_per_image=280, **towers
    )
    assert family(raw).read_config(raw) == read(**GEMMA4)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_weights_type_may_be_said_outside(name):
    raw = dict(model_type="gemma4", text_config=BASE | GEMMA4 | dict(hidden_act=None), **{name: "bfloat16"})
    assert (family(raw).read_config(raw).dtype, read(**GEMMA4).dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_what_a_wrapping_config_says_wrong_is_one_line(case, tmp_path, capsys):
    changes, message = BAD_CONFIGS[case]
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="mistral3", text_config=dict(model_type="mistral"))))
    families.edit_config(tmp_path, **changes)
    assert generate.main(["--model", str(tmp_path), "--prompt", "x", "--max-new-tokens", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"icejax.generate: error: {message}") and err.count("\n") == 1
