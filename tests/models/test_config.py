"""Reading config.json: the forms of transformers 4 and 5, defaults, ignored fields, errors, and that every number is used."""

import copy
import dataclasses
import importlib
import json
import logging
import re

import numpy as np
import pytest
from transformers import AutoConfig

from icejax.cache.registry import Full
from icejax.checkpoint import read_config
from icejax.checks.errors import InputError
from icejax.ops.rope import inverse_frequencies
from tests.helpers import families
from tests.helpers.raw_configs import (
    BASE,
    GEMMA4,
    GLM,
    GPT_OSS,
    LONGROPE,
    MINIMAX,
    MINISTRAL3,
    MISTRAL4,
    MIXTRAL,
    MOE,
    OLMO3,
    PHI3,
    QWEN2_MOE,
    V2,
    V3,
    YARN,
    read,
)  # fmt: skip
from tests.helpers.run import all_logits


@pytest.mark.parametrize(
    "old, new",
    [
        ({"rope_theta": 5e5, "torch_dtype": "bfloat16"}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "dtype": "bfloat16"}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": ..., "rope_theta": 1e4},
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}},
        ),
    ],
)  # fmt: skip
def test_the_forms_of_transformers_4_and_5_read_alike(old, new):
    assert read(**old) == read(**new)


TWICE = {
    "outside and inside": (
        "llama",
        dict(rope_scaling=YARN | {"original_max_position_embeddings": 64}, original_max_position_embeddings=32),
    ),
    "inside alone": (
        "phi3",
        dict(model_type="phi3", rope_scaling=LONGROPE | {"original_max_position_embeddings": 64}),
    ),
    "theta of one kind": ("olmo3", OLMO3 | dict(num_hidden_layers=4, rope_theta=1e6)),
}


@pytest.mark.parametrize("case", TWICE)
def test_rope_equals_transformers_with_fields_doubled_or_absent(case):
    """The reference are the frequency tables of transformers' rotary embeddings."""
    name, changes = TWICE[case]
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    rotary_class = getattr(modeling, f"{name.capitalize()}RotaryEmbedding")
    config = read(**changes, max_position_embeddings=8192)
    theirs = rotary_class(AutoConfig.for_model(**copy.deepcopy(BASE | changes | dict(max_position_embeddings=8192))))
    if case != "inside alone":  # phi3's tables depend on the text's length
        for layer, name in zip(config.layers, config.layer_types, strict=True):
            table = theirs.inv_freq if hasattr(theirs, "inv_freq") else getattr(theirs, f"{name}_inv_freq")
            np.testing.assert_allclose(inverse_frequencies(layer.rope), table.numpy(), rtol=1e-6)
    if config.rope_scaling is not None:
        assert (
            config.rope_scaling.original_max_position_embeddings
            == theirs.config.rope_parameters["original_max_position_embeddings"]
        )
        assert config.rope_scaling.attention_factor == pytest.approx(theirs.attention_scaling)


HARMLESS = {
    "llama": dict(
        is_llama_config=True, rope_interleaved=False, max_length=4096, _attn_implementation_autoset=True,
    ) | {"transformers.js_config": {"dtype": "fp16"}},
    "long": dict(dual_chunk_attention_config=dict(chunk_size=262144)),
    "yarn": dict(rope_scaling=YARN | dict(attn_factor=0.878, finetuned=True, original_max_position_embeddings=128)),
    "qwen3 coder": MOE | dict(qkv_bias=False, use_qk_norm=True, shared_expert_intermediate_size=0),
    "glm 4.5": GLM | dict(topk_method="noaux_tc", scoring_func="sigmoid", decoder_sparse_step=1),
    "mistral 4": MISTRAL4 | dict(topk_method="noaux_tc", moe_layer_freq=1),
}  # fmt: skip


@pytest.mark.parametrize("case", HARMLESS)
def test_what_published_configs_say_beside_is_passed_over(case, caplog):
    changes = HARMLESS[case]
    bare = {name: value for name, value in changes.items() if name in MOE or name in GLM or name in MISTRAL4}
    if case == "yarn":
        bare = dict(rope_scaling=YARN | dict(original_max_position_embeddings=128))
    assert read(**changes) == read(**bare)
    assert [record.getMessage() for record in caplog.records] == {
        "yarn": ["config.json, rope_scaling: rope type 'yarn' does not use 'attn_factor', as in transformers"],
        "long": ["config.json: dual_chunk_attention_config is not used, as in transformers: attention stays plain"],
    }.get(case, [])


IGNORED = {
    "llama": ({}, dict(attn_logit_softcapping=30.0, num_experts=8, qk_norm=True, temperature=0.7, unk_token_id=0)),
    "named": ({}, dict(_model_name_or_path="a/b", unsloth_version="2024.9")),
    "qwen3_moe": (MOE, dict(n_group=4)),
    "deepseek_v3": (V3, dict(index_topk=2048, moe_layer_freq=2, scoring_func="softmax", topk_method="greedy")),
    "minimax_m2": (MINIMAX, dict(attn_type_list=[1, 0, 1], use_qk_norm=False)),
    "olmo2": (dict(model_type="olmo2"), dict(clip_qkv=8.0)),
    "phi3": (PHI3, dict(attention_bias=True, lm_head_bias=True)),
    "gpt_oss": (GPT_OSS, dict(experts_per_token=3, initial_context_length=4096)),
}


@pytest.mark.parametrize("name", IGNORED)
def test_what_transformers_ignores_is_told_and_ignored(name, caplog):
    plain, ignored = IGNORED[name]
    with caplog.at_level(logging.INFO, logger="icejax"):
        assert read(**plain | ignored) == read(**plain)
    assert caplog.messages == [f"config.json: fields that transformers ignores are ignored: {'; '.join(map(repr, ignored))}"]


def test_weights_of_deepseek_v2_are_not_normalised():
    """Its config class has `norm_topk_prob`, which transformers' model does not read."""
    assert read(**V2, norm_topk_prob=True) == read(**V2)
    assert not read(**V2).experts.routing.normalised


def test_an_end_token_of_minus_one_is_none():
    assert read(eos_token_id=-1).eos_token_ids == () and read(eos_token_id=[7, -1]).eos_token_ids == (7,)


def test_unused_fields_of_a_rope_are_named(caplog):
    """transformers takes them, too: a factor without a type, or of another type."""
    assert read(rope_scaling={"factor": 8.0}) == read()
    linear = {"rope_type": "linear", "factor": 2.0}
    assert read(rope_scaling=linear | {"beta_fast": 3}) == read(rope_scaling=linear)
    assert caplog.messages == [
        f"config.json, rope_scaling: rope type {kind!r} does not use {name!r}, as in transformers"
        for kind, name in (("default", "factor"), ("linear", "beta_fast"))
    ]


def test_layers_slide_as_transformers_has_them():
    """A null window is no window; where transformers does not read `layer_types`, all layers are of one kind."""
    slides = dict(use_sliding_window=True, max_window_layers=0)
    assert read(model_type="qwen2", **slides, sliding_window=None).sliding_window is None
    assert read(model_type="qwen2", **slides).sliding_window == 4096
    for family in (MOE | slides, MIXTRAL, PHI3, MINISTRAL3):
        family = family | dict(sliding_window=8)
        assert read(**family, layer_types=3 * ["sliding_attention"]) == read(**family)
        message = (
            f"^config.json: layer_types of a {family['model_type']} model must all be sliding_attention, as its sliding_window"
        )
        with pytest.raises(InputError, match=message):
            read(**family, layer_types=3 * ["full_attention"])
    for rope_changes in (
        {"rope_parameters": {"full_attention": YARN | {"truncate": False}}},
        {"rope_scaling": YARN | {"truncate": False}},
    ):
        with pytest.raises(InputError, match="a rope with truncate=False is not supported where it differs by layer type"):
            read(**OLMO3, **rope_changes)


def test_rope_scaling_put_into_a_new_config_wins(caplog):
    """As in transformers; Qwen's model cards extend the context so. The theta of `rope_parameters` stays, with a warning."""
    merged = read(
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    )
    assert "rope_theta comes from rope_parameters; with rope_scaling, transformers would use its default theta" in caplog.text
    caplog.clear()
    scaling = {"rope_type": "yarn", "factor": 4.0}
    inner = read(rope_parameters={"rope_theta": 1e6}, rope_scaling=scaling | {"rope_theta": 1e5})
    outer = read(rope_parameters={"rope_theta": 1e6}, rope_scaling=scaling, rope_theta=2e5)
    assert (inner.rope_theta, outer.rope_theta, caplog.text) == (1e5, 2e5, "")
    assert merged.rope_theta == 1e6 and merged.rope_scaling.rope_type == "yarn" and merged.rope_scaling.factor == 4.0


def test_uncounted_rope_scalings_lengthen_the_context():
    assert read(rope_scaling={"type": "linear", "factor": 8.0}).context_length == 4096
    assert read(rope_scaling={"type": "dynamic", "factor": 4.0}).context_length == 2048
    assert read().context_length == 512


def test_yarn_lengthens_the_context():
    """Qwen's cards add yarn over 32,768 to a config of 32,768 or 40,960; others count the factor in already."""
    card = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    for counted in (32768, 40960, 131072):
        assert read(rope_scaling=card, max_position_embeddings=counted).context_length == 131072
    assert read(rope_scaling=card, max_position_embeddings=200000).context_length == 200000
    assert read(rope_scaling={"type": "yarn", "factor": 8.0}).context_length == 4096


def test_defaults_of_old_configs():
    """Llama 1 has no fields for KV heads, theta and head size; Mistral's window has a default if absent, and is off if null."""
    config = read(num_key_value_heads=..., rms_norm_eps=...)
    assert (config.num_key_value_heads, config.rope_theta, config.head_dim, config.rms_norm_eps) == (4, 1e4, 16, 1e-6)
    assert read(model_type="mistral").sliding_window == 4096
    assert read(model_type="mistral", sliding_window=None).sliding_window is None
    assert read(model_type="qwen3").head_dim == 128
    mixtral = read(**MIXTRAL, rms_norm_eps=...)
    assert (mixtral.rms_norm_eps, mixtral.rope_theta, mixtral.sliding_window) == (1e-5, 1e6, None)
    assert read(model_type="qwen2", sliding_window=8, use_sliding_window=False).sliding_window is None
    moe = read(**QWEN2_MOE, sliding_window=8, use_sliding_window=True, max_window_layers=2)
    assert moe.layer_types == ("sliding_attention", "full_attention", "full_attention") and moe.qkv_bias
    window = read(model_type="qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=2)
    assert window.layer_types == ("full_attention", "full_attention", "sliding_attention")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": ...}, "config.json has no 'model_type': expected one of llama, mistral"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported: expected one of llama"),
        ({"vocab_size": ...}, "config.json has no 'vocab_size', which a llama model needs"),
        ({"hidden_size": "64"}, "config.json: 'hidden_size' must be a whole number, got '64'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"is_causal": False}, r"is_causal=False is not supported \(only True\)"),
        ({"attention_chunk_size": 64}, "field 'attention_chunk_size' .* is not known"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "field 'per_layer_config'"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 2.0}}, "rope type 'axial' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs 'factor'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": "linear"}, "config.json: 'rope_scaling' must be an object, got 'linear'"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "8"}},
            "rope_scaling: 'factor' must be a number from 1 to 1e\\+06, got '8'",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            r"\['full_attention'\] is not supported: this family has",
        ),
        ({"num_attention_heads": 0}, "'num_attention_heads' must be at least 1, got 0"),
        ({"num_key_value_heads": 3}, "4 attention heads do not divide among 3 KV heads"),
        ({"layer_types": ["full_attention"]}, "layer_types must name .* for 3 layers"),
        ({"layer_types": ["sliding_attention"] * 3}, "no sliding_window is in use"),
    ],
)
def test_what_is_missing_unknown_or_unsupported_is_named(changes, message):
    with pytest.raises(InputError, match=message):
        read(**changes)


def test_gemma_4_says_its_head_sizes_in_two_ways():
    fields = GEMMA4 | dict(attention_k_eq_v=True)
    config = read(**fields, num_global_key_value_heads=1)
    assert config == read(**fields, per_layer_config={"2": {"head_dim": 32, "num_key_value_heads": 1}})
    assert [(x.window, x.kv_heads, x.head_dim, x.rope.size, x.values_from_keys) for x in config.layers[1:]] == [
        (8, 2, 16, 16, False), (None, 1, 32, 32, True)
    ]  # fmt: skip
    assert read(**GEMMA4 | dict(global_head_dim=...)).head_dim == 512


def test_gemma_4_is_read_as_transformers_writes_it(tmp_path):
    """transformers pads layer numbers with zeros to the width of the largest."""
    raw = {name: value for name, value in (BASE | GEMMA4).items() if value is not ...} | dict(num_hidden_layers=12)
    AutoConfig.for_model(raw.pop("model_type"), **raw).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert list(written["per_layer_config"]) == ["05", "11"]
    assert read_config(tmp_path) == read(**GEMMA4, num_hidden_layers=12, eos_token_id=1)
    written["per_layer_config"]["5"] = written["per_layer_config"]["05"]
    with pytest.raises(InputError, match="must give all full-attention layers the same"):
        read(**written)


def test_generation_config_is_read_as_carefully(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    for value, shown in (("two", "'two'"), ([None], "None"), ({"id": 2}, "{'id': 2}")):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        with pytest.raises(
            InputError, match=re.escape(f"generation_config.json: 'eos_token_id' must be a whole number, got {shown}")
        ):
            read_config(tmp_path)


# Fields that alone cannot change logits, or that other tests cover, such as the parity of Gemma and GLM.
INERT = {
    "model_type", "dtype", "eos_token_ids", "max_position_embeddings", "experts", "dense_layers", "latent",
    "norm", "rope_interleave", "hidden_act", "embed_scale", "query_pre_attn_scalar", "sliding_rope",
    "sliding_head_dim", "sliding_key_value_heads", "v_norm", "final_logit_softcapping",
}  # fmt: skip
SHAPES = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tie_word_embeddings", "norm_places",
    "sinks", "values_from_keys", "layer_scalar",
}  # fmt: skip


@pytest.mark.slow
def test_every_number_of_the_config_is_read(tmp_path):
    """Changing a field changes the logits, or the parameters that a checkpoint must have."""
    import icejax.checkpoint.load as load

    model = families.load(families.build(families.row("llama-llama3")), tmp_path)
    prompt = families.tokens(100)
    logits = all_logits(model, prompt, Full())
    parameters = load.abstract(model.config, "float32")[1]
    changes = {
        "rms_norm_eps": 1e-2,
        "rotary_dim": 8,
        "qk_norm": "all",
        "norm_places": "both",
        "rope_theta": 2e4,
        "rope_scaling": None,
        "attn_logit_softcapping": 1.0,
        "layer_types": ("sliding_attention",) * 3,
        "sliding_window": 8,
    }
    for field in dataclasses.fields(model.config):
        if field.name in INERT:
            continue
        old = getattr(model.config, field.name)
        new = changes.get(field.name, not old if isinstance(old, bool) else old * 2 if isinstance(old, int) else old)
        window_fields = {"layer_types", "sliding_window"}
        changed = dataclasses.replace(
            model.config, **{n: changes[n] for n in window_fields} if field.name in window_fields else {field.name: new}
        )
        if field.name == "num_hidden_layers":  # every layer has a type
            changed = dataclasses.replace(changed, layer_types=2 * changed.layer_types)
            assert load.abstract(dataclasses.replace(changed, num_hidden_layers=old), "float32")[1].keys() == parameters.keys()
        if field.name in SHAPES:
            assert {k: p.shape for k, p in load.abstract(changed, "float32")[1].items()} != {
                k: p.shape for k, p in parameters.items()
            }
            continue
        import flax.nnx as nnx
        import jax

        graph, _, tree = load.abstract(changed, "float32")
        changed_logits = all_logits(nnx.merge(graph, jax.tree.unflatten(tree, jax.tree.leaves(model))), prompt, Full())
        assert np.abs(changed_logits - logits).max() > 1e-3, field.name


def test_eos_ids_of_both_files_are_joined(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2]}))
    assert read_config(tmp_path).eos_token_ids == (2, 3)
