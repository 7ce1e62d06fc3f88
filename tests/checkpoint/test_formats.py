"""Reading `quantization_config`: which matrices are quantised, and one-line errors for unsupported formats and bad tensors."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from icejax.api import generate as generation
from icejax.checkpoint import load_model
from icejax.checkpoint.quantized import formats, module_names
from icejax.commands import convert, generate
from icejax.sandbox import client
from tests.helpers import families, quantised
from tests.helpers.checkpoints import same_arrays
from tests.helpers.quantised import FORMATS

WEIGHT = "model.layers.0.mlp.down_proj.weight"
KEY = WEIGHT.removesuffix(".weight")


@pytest.fixture(scope="module")
def model():
    """A model with q, k and v biases and an untied head."""
    return families.build(families.row("qwen2-plain"), num_hidden_layers=2)


def fp8(**changes) -> dict:
    return FORMATS["fp8-blocks"].config | changes


def group(**changes) -> dict:
    config = json.loads(json.dumps(FORMATS["packed-4"].config))
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


def several(**weights) -> dict:
    """A config with a group of all modules, and then one for each of these names; the latter count there."""
    config = group()
    others = {name: {"targets": [f"re:.*{name}$"], "weights": value} for name, value in weights.items()}
    return config | {"config_groups": config["config_groups"] | others}


def layouts(config: dict, *modules: str) -> list[bool]:
    """Returns, for each module, whether `config` quantises it."""
    raw, shapes = {"quantization_config": config}, {f"{module}.weight": (64, 64) for module in modules}
    return [source.layout is not None for source in formats.sources(raw, shapes).values()]


NAMES = (
    "lm_head",
    "model.embed_tokens",
    "model.layers.1.mlp.up_proj",
    "model.layers.11.mlp.up_proj",
    "model.layers.1.mlp.extra",
)


@pytest.mark.parametrize(
    "config, quantised",
    [
        (fp8(), "0 0 1 1 1"),
        (fp8(modules_to_not_convert=["lm_head", "model.layers.1"]), "0 0 0 1 0"),
        (fp8(ignored_layers=["mlp.extra"]), "0 0 1 1 0"),
        (fp8(modules_to_not_convert=["up_proj"]), "0 0 0 0 1"),
        (FORMATS["awq"].config | {"modules_to_not_convert": ["extra"]}, "0 0 1 1 0"),
        (group() | {"ignore": [r"re:.*\.1\.mlp.*", "lm_head"]}, "0 0 0 1 0"),
        (group() | {"ignore": ["model.layers.1.mlp.extra", "model.layers.1"]}, "0 0 1 1 0"),
        (group() | {"config_groups": {}}, "0 0 0 0 0"),
        (group() | {"config_groups": {"a": group()["config_groups"]["group_0"] | {"targets": ["re:.*up_proj$"]}}}, "0 0 1 1 0"),
        (group() | {"config_groups": {"a": {"targets": ["Linear"], "weights": None}}}, "0 0 0 0 0"),
        (several(up_proj=None), "0 0 0 0 1"),
    ],
)
def test_modules_are_left_as_they_are_by_name(config, quantised):
    assert layouts(config, "model.layers.0.mlp.gate") == [False]  # a router
    assert layouts(config, *NAMES) == [flag == "1" for flag in quantised.split()]


CHANNEL = {"dynamic": False, "group_size": None, "num_bits": 8, "strategy": "channel", "symmetric": True, "type": "int"}
DYNAMIC = CHANNEL | {"dynamic": True, "strategy": "token"}
PUBLISHED = {
    "Qwen3-8B-FP8": dict(
        activation_scheme="dynamic", fmt="e4m3", modules_to_not_convert=["lm_head", "model.layers.0.input_layernorm"],
        quant_method="fp8", weight_block_size=[128, 128],
    ),
    "MiniMax-M2.7": dict(
        activation_scheme="dynamic", fmt="float8_e4m3fn", modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"],
        quant_method="fp8", weight_block_size=[128, 128],
    ),
    "Qwen2.5-7B-Instruct-AWQ": dict(
        bits=4, group_size=128, modules_to_not_convert=None, quant_method="awq", version="gemm", zero_point=True
    ),
    "AWQ saved by transformers 5": hf.AwqConfig(modules_to_not_convert=["lm_head"]).to_dict(),
    "Qwen2.5-7B-Instruct-GPTQ-Int4": dict(
        batch_size=1, bits=4, block_name_to_quantize=None, cache_block_outputs=True, damp_percent=0.01, dataset=None,
        desc_act=False, exllama_config={"version": 1}, group_size=128, max_input_length=None, model_seqlen=None,
        module_name_preceding_first_block=None, modules_in_block_to_quantize=None, pad_token_id=None, quant_method="gptq",
        sym=True, tokenizer=None, true_sequential=True, use_cuda_fp16=False, use_exllama=True,
    ),
    "Meta-Llama-3.1-8B-Instruct-quantized.w8a8": dict(
        config_groups={"group_0": {"input_activations": DYNAMIC, "targets": ["Linear"], "weights": CHANNEL}},
        format="int-quantized", global_compression_ratio=1.2, ignore=["lm_head"], kv_cache_scheme=None,
        quant_method="compressed-tensors", quantization_status="compressed", sparsity_config={"format": "dense"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_forms_are_read(name):
    assert layouts(PUBLISHED[name], "model.layers.0.mlp.up_proj", "lm_head") == [True, False]


NOT_READ = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes' is not supported"),
    "unknown": ({"quant_method": "a\nb"}, "is not supported: expected one of fp8, compressed-tensors, awq, gptq, mxfp4"),
    "no method": ({"bits": 4}, "quant_method '' is not supported"),
    "mlx": (
        {"bits": 4, "group_size": 64, "mode": "affine"},
        "quantization_config is MLX's, which is not read: take the folder",
    ),
    "no object": ("fp8", "'quantization_config' must be an object, got 'fp8'"),
    "act-order": (FORMATS["gptq"].config | {"desc_act": True}, "desc_act=True is not supported (only False)"),
    "marlin": (FORMATS["gptq"].config | {"checkpoint_format": "marlin"}, "must be one of gptq, gptq_v2, got 'marlin'"),
    "three bits": (FORMATS["gptq"].config | {"bits": 3}, "'bits' must be one of 4, 8, got 3"),
    "no bits": (FORMATS["gptq"].config | {"bits": None}, "has no 'bits', which a gptq model needs"),
    "no group": (FORMATS["gptq"].config | {"group_size": 0}, "'group_size' must be at least 1, got 0"),
    "gemv": (FORMATS["awq"].config | {"version": "gemv"}, "'version' must be one of gemm, got 'gemv'"),
    "gemv's format": (FORMATS["awq"].config | {"version": None, "format": "gemv"}, "'version' must be one of gemm, got 'gemv'"),
    "one side": (fp8(weight_block_size=[128]), "'weight_block_size' must be rows and columns, got [128]"),
    "e5m2": (fp8(fmt="e5m2"), "fmt='e5m2' is not supported (only 'e4m3')"),
    "unknown field": (fp8(rotation="hadamard"), "field 'rotation' ('hadamard') is not known here and may change"),
    "no names": (fp8(modules_to_not_convert=[3]), "'modules_to_not_convert' must list names or sound expressions, got 3"),
    "expression": (group() | {"ignore": ["re:("]}, "'ignore' must list names or sound expressions, got 're:('"),
    "nvfp4": (group() | {"format": "nvfp4-pack-quantized"}, "'type' of nvfp4-pack-quantized must be one of float, got 'int'"),
    "marlin-24": (group() | {"format": "marlin-24"}, "nvfp4-pack-quantized, got 'marlin-24'"),
    "sparse": (group() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "of sparsity_config must be one of dense, got"),
    "group order": (group(actorder="group"), "'actorder' must be one of static, weight, got 'group'"),
    "no num_bits": (group(num_bits=None), "config_groups.group_0.weights has no 'num_bits', which is needed"),
    "int floats": (group(type="float"), "'type' of pack-quantized must be one of int, got 'float'"),
    "no block": (group(strategy="block"), "has no 'block_structure', which the strategy 'block' needs"),
    "quantised cache": (group() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme={'num_bits': 8} is not supported"),
    "no group object": (group() | {"config_groups": {"a": 1}}, "config_groups.a must be an object, got 1"),
}


@pytest.fixture(scope="module")
def sound(model, tmp_path_factory):
    """Returns a function that gives a valid folder of a format; folders are made once and only read."""
    folders = {}

    def folder(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            quantised.save(model, folders[name], FORMATS[name])
            for file in generation.ASSETS.glob("token*"):
                shutil.copy(file, folders[name])
        return folders[name]

    return folder


def refused(capsys, folder) -> str:
    """Returns the one error line of `icejax generate` on `folder`."""
    capsys.readouterr()
    assert generate.main(["--model", str(folder), "--prompt", "x", "--max-new-tokens", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("icejax.generate: error: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize("case", NOT_READ)
def test_what_is_not_read_is_one_line(capsys, sound, tmp_path, case):
    config, message = NOT_READ[case]
    shutil.copytree(sound("awq"), tmp_path, dirs_exist_ok=True)
    families.edit_config(tmp_path, quantization_config=config)
    assert message in refused(capsys, tmp_path)


def test_an_expression_that_does_not_end_is_one_line(capsys, sound, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "SECONDS", 0.5)
    shutil.copytree(sound("packed-4"), tmp_path, dirs_exist_ok=True)
    families.edit_config(tmp_path, quantization_config=group() | {"ignore": ["re:(.+)+!"]})
    assert "the expression '(.+)+!' did not end in 0.5 s: expected a simpler one" in refused(capsys, tmp_path)


def test_expressions_that_take_long_together_are_one_line(capsys, sound, tmp_path, monkeypatch):
    monkeypatch.setattr(module_names, "MOST_SECONDS", -1)
    shutil.copytree(sound("packed-4"), tmp_path, dirs_exist_ok=True)
    families.edit_config(tmp_path, quantization_config=group() | {"ignore": ["re:lm_head"]})
    assert "the expression 'lm_head' and those before it took more than -1 s: expected a simpler one" in refused(
        capsys, tmp_path
    )


def remove_part(name):
    return lambda tensors: tensors.pop(f"{KEY}.{name}")


def replace_part(name, change):
    def edit(tensors):
        tensors[f"{KEY}.{name}"] = change(tensors[f"{KEY}.{name}"]).contiguous()

    return edit


UNSOUND = {
    "missing scales": (
        "fp8-blocks",
        remove_part("weight_scale_inv"),
        "weights quantised by fp8): {}.weight_scale_inv is missing",
    ),
    "codes of floats": (
        "fp8-blocks",
        replace_part("weight", torch.Tensor.float),
        "{}.weight: dtype F32 is not supported: expected F8_E4M3",
    ),
    "codes of bytes": (
        "fp8-blocks",
        replace_part("weight", lambda w: w.view(torch.int8)),
        "{}.weight: dtype I8 is not supported",
    ),
    "other codes": ("awq", replace_part("qweight", lambda w: w[:, 1:]), "{}.qweight has shape [96, 7], expected [96, 8]"),
    "other groups": ("awq", replace_part("scales", lambda s: s[1:]), "{}.scales has shape [2, 64], expected [3, 64]"),
    "no zero points": ("packed-4-asymmetric", remove_part("weight_zero_point"), "{}.weight_zero_point is missing"),
    "other shape": (
        "packed-4",
        replace_part("weight_shape", lambda s: s + 1),
        "{}.weight_shape says [65, 97], expected [64, 96]: fetch",
    ),
    "other order": (
        "gptq",
        replace_part("g_idx", lambda g: g.flip(0)),
        "{}.g_idx is not in order (act-order is not supported): fetch",
    ),
    "a bias": (
        "gptq",
        lambda tensors: tensors.update({f"{KEY}.bias": torch.ones(64)}),
        "{}.bias is not zero, but config.json says that the format has none: fetch",
    ),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_unsound_tensors_are_one_line(capsys, sound, tmp_path, case):
    name, change, message = UNSOUND[case]
    shutil.copytree(sound(name), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    assert message.format(KEY) in refused(capsys, tmp_path)


def test_format_that_differs_from_the_config_is_one_line(capsys, sound, tmp_path):
    shutil.copytree(sound("awq"), tmp_path, dirs_exist_ok=True)
    families.edit_config(tmp_path, quantization_config=FORMATS["fp8-blocks"].config)
    assert "(weights quantised by fp8): model.layers.0.mlp.down_proj.qweight is not a parameter" in refused(capsys, tmp_path)
    families.edit_config(tmp_path, quantization_config=FORMATS["awq"].config | {"group_size": 16})
    assert f"{KEY}.scales has shape [3, 64], expected [6, 64]" in refused(capsys, tmp_path)


def test_zero_biases_and_activation_scales_are_ignored(model, tmp_path):
    for name, part in ("gptq", ("bias", torch.zeros(64))), ("fp8-blocks", ("activation_scale", torch.ones(1))):
        weights = quantised.save(model, tmp_path / name, FORMATS[name])
        file = tmp_path / name / "model.safetensors"
        save_file(load_file(file) | {f"{KEY}.{part[0]}": part[1]}, file)
        weight = load_model(tmp_path / name, dtype="float32").model.layers[0].mlp.down_proj.weight
        np.testing.assert_allclose(quantised.dense(weight.get_value()), weights[WEIGHT], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "awq" else pytest.mark.slow) for name in FORMATS])
def test_a_round_trip_of_codes_is_bit_exact(model, tmp_path, name):
    source, icejax, back = (tmp_path / part for part in ("hf", "orbax", "back"))
    quantised.save(model, source, FORMATS[name])
    assert convert.main([str(source), str(icejax)], name="icejax convert") == 0
    assert convert.main([str(icejax), str(back)], name="icejax convert") == 0
    stored, converted = (load_file(folder / "model.safetensors") for folder in (source, back))
    assert stored.keys() == converted.keys() and len(stored) > 40
    for key in stored:
        assert (stored[key].dtype, stored[key].shape) == (converted[key].dtype, converted[key].shape)
        assert torch.equal(stored[key].reshape(-1).view(torch.uint8), converted[key].reshape(-1).view(torch.uint8))
    for folder in (icejax, back):
        assert (folder / "config.json").read_text() == (source / "config.json").read_text()
    assert same_arrays(load_model(source), load_model(icejax))
