"""`quantize`: matrices rounded at loading have the expected error, equal a converted folder's, and are logged in a line."""

import json
import logging
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file

from icejax.api import generate as generation
from icejax.cache.registry import Full
from icejax.checkpoint import load, load_model
from icejax.checkpoint.quantized.rounding import METHODS
from icejax.commands import convert, generate
from icejax.models.parts.experts import ExpertStack
from icejax.ops.quantized.products import Grouped
from icejax.runtime import devices
from tests import tolerances
from tests.helpers import families, quantised
from tests.helpers.checkpoints import same_arrays
from tests.helpers.run import all_logits

# Relative errors on Gaussian weights, and the largest code.
ERROR, LARGEST_CODE = {"int8": 0.008, "fp8": 0.026, "int4": 0.118}, {"int8": 127, "fp8": 448, "int4": 7}
GROUP, SIZES = {"int8": None, "fp8": None, "int4": 128}, dict(hidden_size=128, intermediate_size=256)
EACH_METHOD = pytest.mark.parametrize("name", METHODS)


@EACH_METHOD
@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16])
def test_a_matrix_is_rounded_to_the_nearest_codes(name, dtype):
    matrix = np.random.default_rng(0).standard_normal((96, 512)).astype(dtype)
    matrix[3] = 0
    quantized, exact = METHODS[name].rounded(matrix), matrix.astype(np.float32)
    groups = exact.reshape(96, -1, GROUP[name] or 512)
    scale = (np.abs(groups).max(-1) / LARGEST_CODE[name]).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_allclose(quantized.scale, scale, rtol=2.0**-8, atol=1e-37)
    error = np.abs(quantized.weights().reshape(groups.shape) - groups)
    step = np.abs(groups) / 8 + 2.0**-9 * scale[..., None] if name == "fp8" else scale[..., None]
    assert (error <= 0.5 * step + 2.0**-8 * np.abs(groups).max(-1, keepdims=True) * (np.abs(groups) > 6 * step)).all()
    assert np.linalg.norm(error) / np.linalg.norm(exact) < 1.3 * ERROR[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in bf16 with an untied head and a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    families.save(families.build(families.row("llama-gqa"), num_hidden_layers=2, **SIZES).bfloat16(), path)
    for file in generation.ASSETS.glob("token*"):
        shutil.copy(file, path)
    return path


def rounded_to(folder, method) -> dict[str, np.ndarray]:
    """Returns the layers' matrices after rounding, by key."""
    stored = load_file(folder / "model.safetensors")
    names = [key for key in stored if key.endswith("proj.weight")]
    return {key: METHODS[method].rounded(stored[key].float().numpy()).weights() for key in names}


@EACH_METHOD
def test_only_matrices_of_layers_are_rounded(folder, name, caplog):
    plain = load_model(folder, dtype="float32")
    with caplog.at_level(logging.INFO, logger="icejax"):
        rounded_model = load_model(folder, dtype="float32", quantize=name)
    assert caplog.messages == [f"of 14 matrices rounded to {name} 14 stay codes"]
    expected = rounded_to(folder, name)
    keys = load.abstract(plain.config, "float32")[1]
    is_codes = lambda x: isinstance(x, Grouped)  # noqa: E731
    leaves = (jax.tree.leaves(nnx.state(model), is_leaf=is_codes) for model in (rounded_model, plain))
    for key, leaf, original in zip(keys, *leaves, strict=True):
        leaf = quantised.dense(leaf)
        np.testing.assert_array_equal(leaf, expected.pop(key, original))
        assert ("proj" in key) == (not np.array_equal(leaf, original)), key
    assert not expected


@pytest.mark.parametrize("name, kind", [("int4", "int4"), ("fp8", "float8_e4m3fn"), ("int8", "int8")])
def test_they_stay_codes(folder, name, kind, monkeypatch, caplog):
    monkeypatch.setattr(devices, "platform", lambda: "gpu")
    with caplog.at_level(logging.INFO, logger="icejax"):
        weight = load_model(folder, quantize=name).model.layers[1].mlp.down_proj.weight.get_value()
    assert caplog.messages == [f"of 14 matrices rounded to {name} 14 stay codes"]
    assert weight.codes.dtype == kind and weight.zero is None
    dequantised = np.concatenate(list(np.asarray(weight.weights("float32"))), axis=-1)
    np.testing.assert_array_equal(dequantised, rounded_to(folder, name)["model.layers.1.mlp.down_proj.weight"])


def test_routers_stay_and_experts_are_rounded(tmp_path):
    row = families.row("qwen2_moe-plain")
    families.save(families.build(row, num_hidden_layers=1, hidden_size=128), tmp_path)
    plain_mlp, rounded_mlp = (
        load_model(tmp_path, dtype="float32", quantize=quantize).model.layers[0].mlp for quantize in (None, "int8")
    )
    for part in ("gate", "shared_expert_gate"):
        np.testing.assert_array_equal(getattr(plain_mlp, part).weight[...], getattr(rounded_mlp, part).weight[...])
    error = quantised.dense(rounded_mlp.experts.up_proj.weight.get_value()) - plain_mlp.experts.up_proj.weight[...]
    assert 0 < np.linalg.norm(error) < 1.3 * ERROR["int8"] * np.linalg.norm(plain_mlp.experts.up_proj.weight[...])


def rounded(matrix: np.ndarray, method: str, *, turned: bool) -> np.ndarray:
    """Returns a matrix [O, I], or experts' matrices [E, O, I], after rounding; `turned`: stored as [I, O]."""
    if matrix.ndim == 3:
        return np.stack([rounded(expert, method, turned=turned) for expert in matrix])
    return METHODS[method].rounded(matrix.T).weights().T if turned else METHODS[method].rounded(matrix).weights()


ONE_TENSOR = (
    ("gpt_oss-plain", "int8", dict(num_hidden_layers=1)),
    ("gpt_oss-plain", "int4", dict(head_dim=32)),
    ("mistral4-plain", "fp8", dict(moe_intermediate_size=128)),
    ("gemma4_text-experts", "int8", dict(moe_intermediate_size=128)),
)


@pytest.mark.parametrize(
    "row, name, more", [ONE_TENSOR[0], *(pytest.param(*x, marks=pytest.mark.slow) for x in ONE_TENSOR[1:])]
)
def test_experts_in_one_tensor_are_rounded_each_by_itself(row, name, more, tmp_path, caplog):
    """The logits are those of transformers with the rounded weights, which differ from the logits before rounding."""
    sizes = dict(hidden_size=128, intermediate_size=128) | more
    theirs = families.build(families.row(row), **sizes)
    prompt, originals = families.tokens(40), {}
    with torch.no_grad():
        plain = theirs(torch.tensor([prompt])).logits[0].numpy()
        families.save(theirs, tmp_path)
        for key, weight in theirs.named_parameters():
            if (
                ".layers." in key
                and weight.ndim > 1
                and not key.endswith(("gate.weight", "router.weight", "router.proj.weight", "bias"))
            ):
                originals[key], turned = weight.numpy().copy(), weight.ndim == 3 and row.startswith("gpt_oss")
                weight.copy_(torch.tensor(rounded(originals[key], name, turned=turned)))
                error = np.linalg.norm(weight.numpy() - originals[key])
                assert 0 < error < 1.3 * ERROR[name] * np.linalg.norm(originals[key])
        expected = theirs(torch.tensor([prompt])).logits[0].numpy()
    with caplog.at_level(logging.INFO, logger="icejax"):
        coded = load_model(tmp_path, dtype="float32", quantize=name)
    assert caplog.messages[0].startswith(f"of {len(originals)} matrices rounded to {name} ")
    assert isinstance(experts_of(coded).down_proj.weight.get_value(), Grouped)
    np.testing.assert_allclose(all_logits(coded, prompt, Full()), expected, rtol=0, atol=tolerances.LOGITS)
    assert np.abs(plain - expected).max() > 100 * tolerances.LOGITS


def experts_of(model) -> ExpertStack:
    """Returns the experts of the model's last layer."""
    layer = model.model.layers[-1]
    return layer.mlp.experts if hasattr(layer.mlp, "experts") else layer.beside.experts


def refused(capsys, folder, method) -> str:
    """Returns the one error line of `icejax generate --quantize`."""
    capsys.readouterr()
    assert generate.main(["--model", str(folder), "--prompt", "x", "--max-new-tokens", "1", "--quantize", method]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("icejax.generate: error: ") and err.count("\n") == 1
    return err.removeprefix("icejax.generate: error: ").strip()


def test_what_cannot_be_rounded_is_one_line(folder, tmp_path, capsys):
    assert refused(capsys, folder, "nf4") == "quantize must be one of int8, fp8, int4, got 'nf4'"
    narrow = families.build(families.row("llama-gqa"), num_hidden_layers=1, intermediate_size=72)
    quantised.save(narrow, tmp_path / "awq", quantised.FORMATS["awq"])
    families.save(narrow, tmp_path / "narrow")
    families.save(families.build(families.row("mistral4-plain"), num_hidden_layers=2, vocab_size=256), tmp_path / "whole")
    for name in ("awq", "narrow", "whole"):
        for file in generation.ASSETS.glob("token*"):
            shutil.copy(file, tmp_path / name)
    message = f"{tmp_path / 'awq'} is quantised by awq already: leave quantize out, or use the folder that it was made from"
    assert refused(capsys, tmp_path / "awq", "int8") == message
    tensors = "(model.layers.1.mlp.experts.down_proj; model.layers.1.mlp.experts.gate_up_proj)"
    assert convert.main([str(tmp_path / "whole"), str(tmp_path / "x"), "--quantize", "int8"], name="icejax convert") == 2
    message = f"fused experts cannot be saved quantised: convert without --quantize, and give it when loading {tensors}"
    assert capsys.readouterr().err == f"icejax convert: error: {message}\n" and not (tmp_path / "x").exists()
    message = "int4 needs widths that 16 divides, and model.layers.0.mlp.down_proj.weight has 72 columns (1 of 7 matrices)"
    assert refused(capsys, tmp_path / "narrow", "int4") == f"{message}: use int8 or fp8"


def test_widths_that_128_does_not_divide_get_smaller_groups(tmp_path, caplog):
    """SmolLM2's hidden size of 576 is 9 groups of 64; each matrix has the error of its own groups, and a folder keeps them."""
    sizes = dict(hidden_size=192, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, head_dim=48)
    families.save(families.build(families.row("llama-gqa"), **sizes), tmp_path / "hf")
    model = load_model(tmp_path / "hf", quantize="int4")
    line = "int4: groups have 64 instead of 128 columns in 6 of 7 matrices, whose widths 128 does not divide"
    assert caplog.messages.count(line) == 1 and len([x for x in caplog.messages if "128" in x]) == 1
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    for part, module, group in (("self_attn", "q_proj", 64), ("mlp", "up_proj", 64), ("mlp", "down_proj", 128)):
        weight = getattr(getattr(model.model.layers[0], part), module).weight.get_value()
        exact = stored[f"model.layers.0.{part}.{module}.weight"].numpy()
        groups = exact.reshape(len(exact), -1, group)
        scale = (np.abs(groups).max(-1) / 7).astype(ml_dtypes.bfloat16).astype(np.float32)[..., None]
        expected = np.clip(np.round(groups / scale), -7, 7) * scale
        np.testing.assert_allclose(quantised.dense(weight), expected.reshape(exact.shape), atol=1e-6)
    assert convert.main([str(tmp_path / "hf"), str(tmp_path / "codes"), "--quantize", "int4"], name="icejax convert") == 0
    groups = json.loads((tmp_path / "codes" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert [group["weights"]["group_size"] for group in groups.values()] == [64, 128]
    assert groups["group_0"]["targets"][0].startswith("model.layers.0.") and groups["group_1"]["targets"] == ["Linear"]
    assert same_arrays(load_model(tmp_path / "codes"), model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_a_folder_of_codes_is_what_is_rounded_as_it_is_read(folder, tmp_path, name, capsys):
    """In Orbax and Hugging Face form, and bit for bit after conversion between them."""
    plain, coded, back, plain_coded = (tmp_path / form for form in ("plain", "coded", "back", "again"))
    for source, target, options in (
        (folder, coded, ["--quantize", name]),
        (coded, back, []),
        (folder, plain, []),
        (plain, plain_coded, ["--quantize", name]),
    ):
        assert convert.main([str(source), str(target), *options], name="icejax convert") == 0
    expected = load_model(folder, quantize=name)
    for loaded in (load_model(plain, quantize=name), *(load_model(x) for x in (coded, back, plain_coded))):
        assert same_arrays(loaded, expected)
    assert (back / "model.safetensors").read_bytes() == (plain_coded / "model.safetensors").read_bytes()
    stored, unquantised = (load_file(path / "model.safetensors") for path in (back, folder))
    assert sum(x.nbytes for x in stored.values()) < sum(x.nbytes for x in unquantised.values())
    assert convert.main([str(coded), str(tmp_path / "x"), "--quantize", name], name="icejax convert") == 2
    message = f"icejax convert: error: {coded} is quantised by compressed-tensors already: leave quantize out"
    assert capsys.readouterr().err.startswith(message)
