"""Products with quantised matrices equal those with dequantised ones, and a loaded model keeps its codes."""

import dataclasses
import logging

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from icejax.cache.registry import Full
from icejax.checkpoint import load_model
from icejax.engine.decode.nonfinite import not_finite
from icejax.ops.quantized import products
from icejax.ops.quantized.products import MOST_ROWS, Grouped, at_once, by_blocks, rows
from icejax.runtime import devices
from tests import tolerances
from tests.helpers import families, quantised
from tests.helpers.run import all_logits, greedy, jitted

DEQUANTISED = "experts stored in different layouts, or matrices of latent attention that are used head by head"
KINDS = {"int4": ml_dtypes.int4, "int8": np.int8, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "bits": ml_dtypes.bfloat16}


@pytest.mark.parametrize("form", [at_once, by_blocks])
@pytest.mark.parametrize(
    "kind, group, zero",
    [
        ("int4", 32, True),
        ("int8", 96, False),
        ("float8_e4m3fn", 96, False),
        ("bits", 32, True),
        pytest.param("int4", 96, False, marks=pytest.mark.slow),
        pytest.param("int8", 32, True, marks=pytest.mark.slow),
        pytest.param("bits", 96, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("tokens", [1, MOST_ROWS, MOST_ROWS + 1])
def test_a_product_is_that_of_the_dequantised_matrix(kind, group, zero, tokens, form, monkeypatch):
    """`by_blocks` cuts the 40 rows into blocks of 16; the last two blocks overlap."""
    monkeypatch.setattr(products, "BLOCK", 16 * 96)
    monkeypatch.setattr(products, "LARGE_BLOCK", 16 * 96)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, 96)).astype(np.float32)
    shape = (96 // group, 40)
    codes = (rng.standard_normal((*shape, group)) * 3).clip(-8, 7).astype(KINDS[kind])
    scale = rng.uniform(0.01, 0.1, shape).astype(np.float32)
    offset = rng.integers(-8, 8, shape).astype(np.int8)
    stored = codes.view(np.uint16) if kind == "bits" else codes
    parts = [None if part is None else jnp.asarray(part) for part in (stored, scale, offset if zero else None)]
    grouped = Grouped(*parts)
    if form is by_blocks:
        grouped = Grouped(*(None if part is None else part.swapaxes(0, 1) for part in parts), by_row=True)
    matrix = (codes.astype(np.float64) - offset[..., None] * zero) * scale[..., None]
    matrix = np.concatenate(list(matrix), axis=-1)
    expected = x.astype(np.float64) @ matrix.T
    actual = np.asarray(jitted(form, jnp.asarray(x), grouped))
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerances.LOGITS)
    x_bf16 = jnp.asarray(x, "bfloat16")
    actual, expected = np.asarray(jitted(form, x_bf16, grouped)), np.asarray(x_bf16, np.float64) @ matrix.T
    # Scales and sums stay fp32, except where `at_once` makes the matrix in the dtype of many tokens.
    in_fp32 = form is by_blocks or tokens <= MOST_ROWS
    np.testing.assert_allclose(
        actual, expected, rtol=0, atol=tolerances.LOGITS if in_fp32 else 2.0**-6 * np.sqrt(96) * np.abs(matrix).max()
    )
    ids = np.array([[3, 0], [39, 3]])
    np.testing.assert_allclose(jitted(rows, grouped, ids, dtype="float32"), matrix[ids], rtol=0, atol=tolerances.LOGITS)


def test_matrices_by_rows_become_dense_unless_they_are_too_many(monkeypatch):
    rng = np.random.default_rng(1)
    codes, scale, zero = (
        rng.integers(-8, 8, (6, 2, 4)).astype(np.int8),
        rng.random((6, 2)).astype(np.float32),
        np.int8([[3]] * 6),
    )
    matrix = Grouped(jnp.asarray(codes), jnp.asarray(scale), jnp.asarray(np.repeat(zero, 2, axis=1)), by_row=True)
    experts = Grouped(jnp.zeros((3, 6, 2, 4), jnp.int8), jnp.zeros((3, 6, 2)), None, by_row=True)
    columns = Grouped(jnp.zeros((2, 6, 4), jnp.int8), jnp.zeros((2, 6)), None)
    part = dict(matrix=matrix, experts=experts, columns=columns, norm=jnp.ones(4))
    actual = products.with_dense_matrices(part)
    expected = ((codes - 3.0) * scale[..., None]).reshape(6, 8)
    np.testing.assert_allclose(actual["matrix"], expected, rtol=0, atol=tolerances.EXACT)
    assert actual["matrix"].dtype == jnp.float32 and actual["norm"] is part["norm"]
    assert actual["experts"].codes is experts.codes and actual["columns"].codes is columns.codes
    monkeypatch.setattr(products, "MOST_DENSE", codes.size - 1)
    assert products.with_dense_matrices(part)["matrix"] is matrix


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a function of a format's name: a folder of codes, and a folder of the weights that they stand for."""
    model = families.build(families.row("qwen2-plain"), num_hidden_layers=2)

    def folders(name):
        path = tmp_path_factory.mktemp(name)
        weights = quantised.save(model, path / "codes", quantised.FORMATS[name])
        return path / "codes", quantised.write_plain(path / "codes", weights, path / "plain")

    return folders


@pytest.mark.parametrize(
    "name, kind, zero",
    [
        ("fp8-blocks", "float8_e4m3fn", False),
        ("int-asymmetric", "int8", True),
        ("packed-4", "int4", False),
        ("awq", "int4", True),
        ("gptq-8", "int8", True),
        ("nvfp4", "int8", False),
    ],
)
def test_matrices_stay_codes(folder, monkeypatch, caplog, name, kind, zero):
    """A CPU stores them in wider dtypes, which hold the same numbers."""
    path, plain_path = folder(name)
    plain = load_model(plain_path, dtype="float32").model.layers[1].mlp.down_proj.weight.get_value()
    for platform, dtype in (("gpu", kind), ("cpu", {"int4": "int8", "float8_e4m3fn": "uint16"}.get(kind, kind))):
        monkeypatch.setattr(devices, "platform", lambda platform=platform: platform)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="icejax"):
            coded = load_model(path, dtype="float32").model.layers[1].mlp.down_proj.weight.get_value()
        method = quantised.FORMATS[name].config["quant_method"]
        assert caplog.messages == [f"of 14 matrices quantised by {method} 14 stay codes"]
        assert coded.codes.dtype == dtype and (coded.zero is not None) == zero
        weights = np.asarray(coded.weights("float32"))
        assert coded.by_row == (platform == "cpu")
        matrix = np.concatenate(list(weights.swapaxes(0, 1) if coded.by_row else weights), axis=-1)
        np.testing.assert_allclose(matrix, np.asarray(plain), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8-blocks", "awq"])
def test_a_model_of_codes_is_that_of_its_dequantised_weights(folder, name):
    """In prefill, whose products have many rows, and in decode, whose products have few."""
    prompts = [families.tokens(40), families.tokens(30, seed=1)]
    actual, expected = (greedy(load_model(path, dtype="float32"), Full(), prompts, 4) for path in folder(name))
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_allclose(actual[1], expected[1], rtol=0, atol=tolerances.LOGITS)


def test_experts_stay_codes_but_in_several_forms(tmp_path, caplog):
    model, prompts = families.build(families.row("qwen3_moe-plain"), num_hidden_layers=1), [families.tokens(20)]
    path = tmp_path / "codes"
    weights = quantised.save(model, path, quantised.FORMATS["awq"])
    plain = load_model(quantised.write_plain(path, weights, tmp_path / "plain"), dtype="float32")
    with caplog.at_level(logging.INFO, logger="icejax"):
        coded = load_model(path, dtype="float32")
    num_matrices = sum(".experts." in key for key in weights)
    assert num_matrices and caplog.messages == [
        f"of {num_matrices + 4} matrices quantised by awq {num_matrices + 4} stay codes"
    ]
    stack = coded.model.layers[0].mlp.experts.down_proj.weight.get_value()
    for expert, actual in enumerate(np.asarray(stack.weights("float32"))):
        expected = weights[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"]
        np.testing.assert_allclose(actual.reshape(expected.shape), expected, rtol=1e-6, atol=1e-6)
    expected, actual = (greedy(model, Full(), prompts, 3) for model in (plain, coded))
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_allclose(actual[1], expected[1], rtol=0, atol=tolerances.LOGITS)
    unconverted = "model.layers.0.mlp.experts.3.down_proj"
    families.edit_config(path, quantization_config=quantised.FORMATS["awq"].config | {"modules_to_not_convert": [unconverted]})
    stored = load_file(path / "model.safetensors")
    stored = {key: x for key, x in stored.items() if not key.startswith(unconverted)} | {
        f"{unconverted}.weight": weights[f"{unconverted}.weight"]
    }
    save_file(stored, path / "model.safetensors")
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="icejax"):
        dequantised = load_model(path, dtype="float32").model.layers[0].mlp.experts.down_proj.weight[...]
    count = num_matrices // 3 - 1
    reason = f"{count} are dequantised as they are read ({DEQUANTISED})"
    assert caplog.messages == [
        f"of {num_matrices + 3} matrices quantised by awq {num_matrices + 3 - count} stay codes, {reason}"
    ]
    np.testing.assert_allclose(dequantised[3], weights[f"{unconverted}.weight"], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_what_makes_heads_of_a_latent_is_dequantised(tmp_path):
    """The projection from the latent is used head by head; the other projections stay codes."""
    path = tmp_path / "codes"
    weights = quantised.save(families.build(families.row("deepseek_v3-yarn")), path, quantised.FORMATS["fp8-blocks"])
    folders = path, quantised.write_plain(path, weights, tmp_path / "plain")
    coded, plain = (load_model(folder, dtype="float32") for folder in folders)
    attention = coded.model.layers[0].self_attn
    assert isinstance(attention.q_b_proj.weight.get_value(), Grouped) and isinstance(
        attention.kv_b_proj.weight[...], jnp.ndarray
    )
    expected, actual = (greedy(model, Full(), [families.tokens(40)], 4)[1] for model in (plain, coded))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerances.LOGITS)


@pytest.mark.slow
def test_codes_in_one_tensor_are_taken_apart(tmp_path):
    """Phi-3 stores the query, key and value projections as rows of one tensor."""
    path = tmp_path / "codes"
    weights = quantised.save(families.build(families.row("phi3-long")), path, quantised.FORMATS["awq"])
    folders = path, quantised.write_plain(path, weights, tmp_path / "plain")
    coded, plain = (load_model(folder, dtype="float32") for folder in folders)
    assert isinstance(coded.model.layers[0].self_attn.k_proj.weight.get_value(), Grouped)
    expected, actual = (greedy(model, Full(), [families.tokens(40)], 4)[1] for model in (plain, coded))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerances.LOGITS)


def test_blocks_of_gpt_oss_stay_codes(tmp_path):
    """The model's logits are those of the weights that transformers dequantises from the blocks."""
    theirs, stored, rng = families.build(families.row("gpt_oss-plain")), {}, np.random.default_rng(0)
    for key, tensor in theirs.state_dict().items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[key] = tensor.numpy()
            continue
        count, columns, rows = tensor.shape
        stored[f"{key}_blocks"] = rng.integers(0, 256, (count, rows, columns // 32, 16)).astype(np.uint8)
        stored[f"{key}_scales"] = rng.integers(121, 125, (count, rows, columns // 32)).astype(np.uint8)
        parts = (torch.tensor(stored[f"{key}_{name}"]) for name in ("blocks", "scales"))
        tensor.copy_(convert_moe_packed_tensors(*parts, dtype=torch.float32))
    families.save(theirs, tmp_path)
    save_file(stored, tmp_path / "model.safetensors")
    unquantised = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    families.edit_config(tmp_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": unquantised})
    prompt = families.tokens(40)
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0].numpy()
    model = load_model(tmp_path, dtype="float32")
    experts = model.model.layers[0].mlp.experts
    assert all(isinstance(x.weight.get_value(), Grouped) for x in (experts.up_proj, experts.down_proj))
    np.testing.assert_allclose(all_logits(model, prompt, Full()), expected, rtol=0, atol=tolerances.LOGITS)


def test_a_scale_of_nan_is_named(folder):
    model = load_model(folder("awq")[0], dtype="float32")
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.set_value(dataclasses.replace(weight.get_value(), scale=weight.get_value().scale.at[0, 0].set(jnp.nan)))
    expected = "model.layers.1.mlp.up_proj.weight.scale holds NaN: fetch the checkpoint again"
    assert not_finite(model, families.tokens(8)) == expected
