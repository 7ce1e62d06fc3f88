"""Models from GGUF files: their logits are those of transformers' model with the same weights."""

import json
import logging

import gguf
import numpy as np
import pytest
import torch

from icejax.cache.registry import Full
from icejax.checkpoint import load_model
from icejax.checkpoint.folder import resolve
from icejax.checkpoint.gguf.config import raw_config
from icejax.checkpoint.gguf.numbers import read_numbers
from icejax.checkpoint.gguf.parts import read_model
from icejax.checks.errors import InputError
from icejax.commands import convert
from tests import tolerances
from tests.helpers import families, gguf_files
from tests.helpers.run import all_logits

LENGTH = 150  # longer than the windows, and than RoPE's original contexts
LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
GEMMA = dict(query_pre_attn_scalar=16)  # the heads' size, as in all published models but the largest
GEMMA_ROPE = dict(
    full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
    sliding_attention=dict(rope_type="default", rope_theta=1e4),
)
SIX = dict(layer_types=["sliding_attention"] * 5 + ["full_attention"], num_hidden_layers=6)
ALTERNATING = dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"])
# Row of family_rows -> changes of its config. Each is a model that llama.cpp's converter could have written.
MODELS = {
    "llama-gqa": {},
    "llama-mqa-tied": {},
    "llama-biases": dict(head_dim=16),
    "llama-head-dim": {},
    "llama-linear": {},
    "llama-llama3": dict(head_dim=16),  # not Llama 3.1's original context
    "llama-yarn": {},
    "mistral-plain": {},
    "mistral-window": {},
    "qwen2-plain": {},
    "qwen2-tied": {},
    "qwen2-yarn": {},
    "qwen3-plain": {},
    "qwen3-biases": {},
    "qwen3_moe-plain": dict(head_dim=16, decoder_sparse_step=1),
    "gemma2-plain": GEMMA | ALTERNATING,
    "gemma3_text-plain": GEMMA | SIX | dict(rope_parameters=GEMMA_ROPE, final_logit_softcapping=None),
    "gpt_oss-plain": ALTERNATING | dict(swiglu_limit=7.0, swiglu_alpha=1.702),
    "phi3-long": {},
    "phi3-window": {},
}


@pytest.fixture(autouse=True)
def no_tokenizers(monkeypatch):
    gguf_files.without_tokenizers(monkeypatch)


def reference(model, prompt) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0].numpy()


def same_logits(theirs, file, length=LENGTH) -> None:
    prompt = families.tokens(length)
    ours = all_logits(load_model(file), prompt, Full())
    np.testing.assert_allclose(ours, reference(theirs, prompt), rtol=0, atol=tolerances.LOGITS)


@pytest.mark.parametrize(
    "name, scale",
    [
        pytest.param(name, scale, marks=() if scale == "fan_in" else pytest.mark.slow)
        for name in MODELS
        for scale in ("fan_in", "default")
    ],
)
def test_logits_equal_transformers(name, scale, tmp_path):
    theirs = families.build(families.row(name), scale, **MODELS[name])
    same_logits(theirs, gguf_files.write(theirs, tmp_path / "model.gguf"))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_logits_equal_transformers_from_codes(kind, tmp_path):
    theirs = families.build(families.row("llama-gqa"))
    same_logits(theirs, gguf_files.write(theirs, tmp_path / "model.gguf", kind))


@pytest.mark.parametrize("name, changes", [("qwen3_moe-plain", dict(moe_intermediate_size=32)), ("gpt_oss-plain", {})])
def test_logits_of_experts_equal_transformers_from_codes(name, changes, tmp_path):
    theirs = families.build(families.row(name), **(MODELS[name] | changes))
    same_logits(theirs, gguf_files.write(theirs, tmp_path / "model.gguf", "MXFP4"))


def config_of(file) -> dict:
    return json.loads((resolve(file) / "config.json").read_text())


def written(tmp_path, name="llama-gqa", *, changes=None, **options):
    theirs = families.build(families.row(name), **(MODELS[name] | (changes or {})))
    return gguf_files.write(theirs, tmp_path / "model.gguf", **options)


def test_llama_3_1s_scaling_is_known_by_its_tensor(tmp_path):
    rope = LLAMA3 | dict(original_max_position_embeddings=8192)
    theirs = families.build(families.row("llama-gqa"), head_dim=16, rope_parameters=rope)
    file = gguf_files.write(theirs, tmp_path / "model.gguf")
    assert config_of(file)["rope_parameters"] == rope
    same_logits(theirs, file)


def test_gemma_3_has_the_pattern_and_base_that_files_lack(tmp_path):
    file = written(tmp_path, "gemma3_text-plain", leave_out=("rope.freq_base_swa",))
    config = config_of(file)
    assert config["layer_types"] == SIX["layer_types"] and config["query_pre_attn_scalar"] == 16
    assert config["rope_parameters"] == GEMMA_ROPE


@pytest.mark.parametrize("changes", [dict(leave_out=("attention.sliding_window",)), dict(attention__sliding_window=0)])
def test_a_gemma_3_without_a_window_attends_to_all(tmp_path, changes):
    """As llama.cpp's converter writes models all of whose layers are global, and as llama.cpp reads them."""
    theirs = families.build(
        families.row("gemma3_text-plain"), **GEMMA | dict(layer_types=["full_attention"] * 3, num_hidden_layers=3)
    )
    file = gguf_files.write(theirs, tmp_path / "model.gguf", **changes)
    assert config_of(file)["layer_types"] == ["full_attention"] * 3
    same_logits(theirs, file)


@pytest.mark.parametrize("given, types", [(3, "ssf"), ([False, True, True], "fss")])
def test_a_pattern_in_the_file_is_taken(tmp_path, given, types):
    file = written(
        tmp_path, "gemma3_text-plain", changes=dict(num_hidden_layers=3, layer_types=ALTERNATING["layer_types"]),
        attention__sliding_window_pattern=given,
    )  # fmt: skip
    assert "".join(name[0] for name in config_of(file)["layer_types"]) == types


def test_what_a_file_leaves_out_has_llama_cpps_defaults(tmp_path):
    left_out = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    config = config_of(written(tmp_path, "llama-gqa", changes=dict(num_key_value_heads=4), leave_out=left_out))
    assert (config["num_key_value_heads"], config["head_dim"], config["rope_parameters"]["rope_theta"]) == (4, 16, 1e4)
    assert config["rms_norm_eps"] == 1e-6 and config["eos_token_id"] == 2


def test_divisors_of_frequencies_and_a_linear_factor_multiply(tmp_path):
    """llama.cpp divides the position by both."""
    rope = LLAMA3 | dict(original_max_position_embeddings=8192)
    file = written(
        tmp_path, changes=dict(head_dim=16, rope_parameters=rope), rope__scaling__factor=4.0, rope__scaling__attn_factor=1.5
    )
    found, divisors = config_of(file)["rope_parameters"], read_numbers(read_model(file).tensors["rope_freqs.weight"])
    assert found["rope_type"] == "longrope" and found["attention_factor"] == 1.5
    for factors in (found["long_factor"], found["short_factor"]):
        np.testing.assert_allclose(factors, 4 * divisors, rtol=1e-6)


LINEAR = dict(rope_type="linear", rope_theta=1e4, factor=4.0)
SCALINGS = {
    "factor": (dict(rope__scaling__factor=4.0), LINEAR),
    "older name": (dict(rope__scale_linear=4.0), LINEAR),
    "both names": (dict(rope__scaling__factor=4.0, rope__scale_linear=2.0), LINEAR),
    "type and older name": (dict(rope__scaling__type="linear", rope__scale_linear=4.0), LINEAR),
    "factor 0": (dict(rope__scaling__factor=0.0), dict(rope_type="default", rope_theta=1e4)),
    "factor 1": (dict(rope__scaling__type="linear", rope__scaling__factor=1.0), dict(rope_type="default", rope_theta=1e4)),
    "type none": (dict(rope__scaling__type="none", rope__scaling__factor=4.0), dict(rope_type="default", rope_theta=1e4)),
}


@pytest.mark.parametrize("case", SCALINGS)
def test_scaling_without_a_type_is_linear(tmp_path, case):
    changes, expected = SCALINGS[case]
    assert config_of(written(tmp_path, **changes))["rope_parameters"] == expected


@pytest.mark.parametrize("role", ["eos", "bos"])
@pytest.mark.parametrize("token, expected", [(-1, None), (2**32 - 1, None), (None, None), (3, 3)])
def test_a_token_that_a_file_denies_is_none(tmp_path, role, token, expected):
    model = read_model(written(tmp_path))
    values = model.values | {f"tokenizer.ggml.{role}_token_id": token}
    assert raw_config(values, model.tensors, read=None, source="x")[f"{role}_token_id"] == expected
    with pytest.raises(InputError, match=f"'tokenizer.ggml.{role}_token_id' must be at least -1, got -2"):
        raw_config(values | {f"tokenizer.ggml.{role}_token_id": -2}, model.tensors, read=None, source="x")


def test_a_file_whose_end_token_is_denied_loads(tmp_path):
    file = written(tmp_path, vocabulary={"tokenizer.ggml.eos_token_id": 2**32 - 1})
    assert load_model(file).config.eos_token_ids == ()


def test_faults_of_tensors_name_the_file(tmp_path):
    with pytest.raises(InputError) as told:
        load_model(written(tmp_path, feed_forward_length=20))
    assert str(told.value).startswith(f"{tmp_path / 'model.gguf'} does not fit its metadata: model.layers.0.mlp.")


MISSING = (
    "context_length embedding_length block_count feed_forward_length attention.head_count attention.layer_norm_rms_epsilon"
).split()


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_value_is_one_line(tmp_path, name):
    with pytest.raises(InputError, match=rf"^model.gguf has no 'llama.{name}', which is needed$"):
        resolve(written(tmp_path, leave_out=(name,)))


REFUSED = {
    "heads per layer": (dict(attention__head_count=[4, 4, 2]), "'llama.attention.head_count' differs from layer to layer"),
    "heads as text": (dict(attention__head_count="4"), "'llama.attention.head_count' must be a whole number, got '4'"),
    "values unlike keys": (dict(attention__value_length=8), "keys have 16 dimensions and values 8, expected the same number"),
    "part of a head": (dict(rope__dimension_count=8), "rope.dimension_count is 8, expected the heads' size, 16"),
    "other scaling": (dict(rope__scaling__type="su"), "rope.scaling.type 'su' is not supported"),
    "no factors": (dict(rope__scaling__type="longrope"), "rope_factors_long.weight and rope_factors_short.weight are missing"),
    "no factor": (dict(rope__scaling__type="yarn"), "yarn needs rope.scaling.factor of 1 or more"),
    "part of yarn": (
        dict(
            rope__scaling__type="yarn",
            rope__scaling__factor=4.0,
            rope__scaling__original_context_length=64,
            rope__scaling__yarn_ext_factor=0.5,
        ),
        "rope.scaling.yarn_ext_factor other than 1 is not supported",
    ),
    "yarn and divisors": (
        dict(
            changes=dict(head_dim=16, rope_parameters=LLAMA3 | dict(original_max_position_embeddings=8192)),
            rope__scaling__type="yarn",
            rope__scaling__factor=4.0,
        ),
        "rope.scaling.type 'yarn' with rope_freqs.weight is not supported",
    ),
    "strength": (dict(rope__scaling__attn_factor=1.5), "rope.scaling.attn_factor is 1.5, expected 1 without yarn or longrope"),
    "later tokens": (dict(attention__causal=False), "attention.causal is false: attention to later tokens is not supported"),
    "experts": (dict(expert_count=8), "is a llama with experts (Mixtral), which is not read from GGUF"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_is_not_read_is_one_line(tmp_path, case):
    changes, message = REFUSED[case]
    with pytest.raises(InputError) as told:
        resolve(written(tmp_path, **changes))
    assert message in str(told.value) and "\n" not in str(told.value)


def test_tensors_that_are_no_models_are_one_line(tmp_path):
    model = read_model(written(tmp_path))
    others = {name: tensor for name, tensor in model.tensors.items() if name != "token_embd.weight"}
    with pytest.raises(InputError, match="^x has no matrix token_embd.weight: expected a language model, whole or with all"):
        raw_config(model.values, others, read=None, source="x")
    for shape in ((4, 2), (2**12 + 1,)):
        odd = model.tensors | {"rope_freqs.weight": model.tensors["output_norm.weight"]._replace(shape=shape)}
        with pytest.raises(InputError, match=r"^x: rope_freqs.weight has shape \[.*\], expected one number per frequency$"):
            raw_config(model.values, odd, read=None, source="x")


def test_an_unknown_architecture_is_one_line(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        InputError, match="the architecture 'mamba' is not read from GGUF: expected one of llama, mistral, qwen2"
    ):
        resolve(tmp_path / "model.gguf")


def test_a_value_that_is_not_read_is_told(tmp_path, caplog):
    written(tmp_path, strange__value=3)
    resolve(tmp_path / "model.gguf")
    assert "model.gguf: 'llama.strange.value' not read" in caplog.text


def test_the_log_tells_which_types_are_dequantised(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    file, told = written(tmp_path, kind="Q4_0"), "tensors are dequantised as they are read: 23 in Q4_0"
    load_model(file)
    assert told not in caplog.text
    load_model(file, quantize="int8")
    assert told in caplog.text


def test_a_gguf_file_converts_to_an_icejax_folder(tmp_path, capsys):
    theirs = families.build(families.row("qwen2-plain"))
    file = gguf_files.write(theirs, tmp_path / "model.gguf", "Q8_0")
    assert convert.main([str(file), str(tmp_path / "folder")], name="convert") == 0
    assert {path.name for path in (tmp_path / "folder").iterdir()} == {"config.json", "tokenizer_config.json", "orbax"}
    same_logits(theirs, tmp_path / "folder")
    assert convert.main([str(tmp_path / "folder"), str(tmp_path / "back")], name="convert") == 0
    same_logits(theirs, tmp_path / "back")


@pytest.mark.slow
def test_a_gguf_file_is_rounded_as_it_is_read(tmp_path):
    theirs, prompt = families.build(families.row("qwen2-plain")), families.tokens(LENGTH)
    file = gguf_files.write(theirs, tmp_path / "model.gguf")
    rounded = all_logits(load_model(file, quantize="int8"), prompt, Full())
    theirs.save_pretrained(tmp_path / "folder")
    expected = all_logits(load_model(tmp_path / "folder", quantize="int8"), prompt, Full())
    np.testing.assert_array_equal(rounded, expected)


# Changes of a model without which transformers reads another one: it knows the heads' size of some
# families by its defaults alone, and drops RoPE's scaling.
READ_BY_TRANSFORMERS = {
    "llama-gqa": {},
    "qwen2-plain": {},
    "qwen3-plain": dict(head_dim=128),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_logits_equal_transformers_reading_the_file(name, tmp_path):
    theirs = families.build(families.row(name), **(MODELS[name] | READ_BY_TRANSFORMERS[name]))
    file = gguf_files.write(theirs, tmp_path / "model.gguf", "Q8_0", vocab_size=theirs.config.vocab_size)
    read = type(theirs).from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).eval()
    same_logits(read, file)
