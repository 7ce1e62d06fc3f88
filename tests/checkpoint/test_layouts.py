"""Reading every layout of quantised weights: matrices equal the numpy reference, folders have their dequantised logits."""

import json
import logging
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from icejax.cache.registry import Full
from icejax.checkpoint import load, load_model
from icejax.checkpoint.quantized import formats
from icejax.checkpoint.quantized.words import unpack
from tests import tolerances
from tests.helpers import families, quantised
from tests.helpers.peak import resident_peak
from tests.helpers.quantised import FORMATS
from tests.helpers.run import all_logits

WEIGHT = "model.layers.0.mlp.down_proj.weight"
KEY = WEIGHT.removesuffix(".weight")
EACH_FORMAT = pytest.mark.parametrize("name", FORMATS)


def read(config: dict, tensors: dict[str, torch.Tensor], shape: tuple[int, int]) -> np.ndarray:
    """Returns one matrix f32[shape] as icejax reads it from `tensors`, whose names lack the module."""
    source = formats.sources({"quantization_config": config}, {WEIGHT: shape})[WEIGHT]
    stored = {key: tensors[key.removeprefix(KEY + ".")] for key in source.parts if key.removeprefix(KEY + ".") in tensors}
    assert len(stored) == len(tensors)
    for key, tensor in stored.items():
        assert tuple(tensor.shape) in source.parts[key].shapes
    return source.read({key: _numpy(tensor) for key, tensor in stored.items()}).weights()


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    for kind, bits, name in (
        (torch.float8_e4m3fn, torch.uint8, "float8_e4m3fn"),
        (torch.bfloat16, torch.int16, "bfloat16"),
    ):
        if tensor.dtype == kind:
            return tensor.view(bits).numpy().view(name)
    return tensor.numpy()


@EACH_FORMAT
@pytest.mark.parametrize("shape", [(72, 160), (8, 40)])
def test_a_matrix_is_what_its_bits_say(name, shape):
    """It is near the Gaussian that was encoded, too. Both shapes leave some layouts' last block cut short."""
    format = FORMATS[name]
    matrix = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    tensors = format.write(matrix)
    weights = read(format.config, tensors, shape)
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, format.read(tensors, shape), rtol=1e-6, atol=1e-6)
    assert np.linalg.norm(weights - matrix) / np.linalg.norm(matrix) < 1.3 * format.error


@EACH_FORMAT
def test_any_bits_are_read_alike(name):
    """Random bits cover all codes and zero points, also those that no quantiser writes."""
    format, rng, shape = FORMATS[name], np.random.default_rng(1), (64, 96)
    tensors = format.write(rng.standard_normal(shape).astype(np.float32))
    for key, tensor in tensors.items():
        if tensor.dtype in (torch.int32, torch.int8) and key not in ("g_idx", "weight_shape"):
            limits = torch.iinfo(tensor.dtype)
            tensors[key] = torch.tensor(rng.integers(limits.min, limits.max, tensor.shape, endpoint=True)).to(tensor.dtype)
    weights = read(format.config, tensors, shape)
    np.testing.assert_allclose(weights, format.read(tensors, shape), rtol=1e-6, atol=1e-6)


def test_a_block_may_be_larger_than_any_matrix():
    rng, largest = np.random.default_rng(0), 2**31 - 1
    format = quantised.fp8([largest, largest])
    tensors = format.write(rng.standard_normal((8, 40)).astype(np.float32))
    np.testing.assert_allclose(read(format.config, tensors, (8, 40)), format.read(tensors, (8, 40)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_the_lowest_number_first(bits):
    numbers = [*range(32 // bits)]
    word = sum(number << (bits * number) for number in numbers)
    assert unpack(np.array([[word]], np.int32), bits).tolist() == [numbers]


def test_blocks_of_gpt_oss_are_those_of_transformers():
    """With all codes, and all exponents that do not overflow fp32."""
    raw = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}}
    key, router, shape = "model.layers.3.mlp.experts.down_proj", "model.layers.3.mlp.router.weight", (2, 64, 127)
    sources = formats.sources(raw, {key: shape, router: (2, 64)})
    assert sources[router].layout is None
    bits = torch.tensor(np.random.default_rng(0).integers(0, 256, (2, 127, 2, 16)), dtype=torch.uint8)
    exponents = torch.arange(2 * 127 * 2).reshape(2, 127, 2).remainder(252).to(torch.uint8)
    tensors = {f"{key}_blocks": bits.numpy(), f"{key}_scales": exponents.numpy()}
    assert {name: part.shapes for name, part in sources[key].parts.items()} == {k: (t.shape,) for k, t in tensors.items()}
    expected = convert_moe_packed_tensors(bits, exponents, dtype=torch.float32).transpose(1, 2)
    for expert in range(2):
        np.testing.assert_array_equal(sources[key].read(tensors, expert=expert).weights(), expected[expert])


@pytest.fixture(scope="module")
def model():
    """A model with q, k and v biases and an untied head."""
    return families.build(families.row("qwen2-plain"), num_hidden_layers=2)


@pytest.mark.parametrize("name", ["fp8-blocks", "int-asymmetric", "packed-4-asymmetric", "awq", "gptq"])
def test_a_folder_has_the_logits_of_its_dequantised_weights(model, tmp_path, name, caplog):
    weights = quantised.save(model, tmp_path / name, FORMATS[name])
    dequantised = tmp_path / "plain"
    shutil.copytree(tmp_path / name, dequantised)
    families.edit_config(dequantised, quantization_config=...)
    save_file(model.state_dict() | {key: torch.tensor(w) for key, w in weights.items()}, dequantised / "model.safetensors")
    with caplog.at_level(logging.INFO, logger="icejax"):
        quantised_model = load_model(tmp_path / name, dtype="float32")
    method = FORMATS[name].config["quant_method"]
    assert caplog.messages == [f"of 14 matrices quantised by {method} 14 stay codes"]
    prompt = families.tokens(40)
    expected = all_logits(load_model(dequantised, dtype="float32"), prompt, Full())
    np.testing.assert_allclose(all_logits(quantised_model, prompt, Full()), expected, rtol=0, atol=tolerances.LOGITS)
    with torch.no_grad():  # the unquantised logits differ
        assert np.abs(model(torch.tensor([prompt])).logits[0].numpy() - expected).max() > 100 * tolerances.LOGITS


STORED = {"F32": torch.float32, "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8-blocks", "awq"])
def test_loading_peaks_under_1_3_times_the_model(tmp_path, name):
    """The codes are random."""
    sizes = dict(vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8)
    raw = families.SIZES | sizes | dict(model_type="llama", quantization_config=FORMATS[name].config)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shapes = {key: leaf.shape for key, leaf in load.abstract(load.read_config(tmp_path), "float32")[1].items()}
    parts = {key: part for source in formats.sources(raw, shapes).values() for key, part in source.parts.items() if part.needed}
    tensors = {key: torch.randint(0, 255, part.shapes[0]).to(STORED[part.dtypes[0]]) for key, part in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    group = FORMATS["awq"].config["group_size"]
    code_bytes = {"fp8-blocks": 2, "awq": 1 + 5 / group}[
        name
    ]  # on a CPU: bits of bfloat16; int8, with scale and zero per group
    size = sum(math.prod(shape) * (code_bytes if "proj" in key else 2) for key, shape in shapes.items())
    peak = resident_peak(f"icejax.checkpoint.load_model({str(tmp_path)!r}, dtype='bfloat16')")
    print(f"peak {peak / size:.3f} of the model")
    assert size > 2e8 and 0.9 * size < peak < 1.3 * size


def test_a_dtype_of_16_bits_is_rounded_once(model, tmp_path):
    weights = quantised.save(model, tmp_path, FORMATS["awq"])
    codes = load_model(tmp_path, dtype="bfloat16").model.layers[0].mlp.down_proj.weight.get_value()
    matrix = quantised.dense(codes, "bfloat16")
    np.testing.assert_array_equal(matrix, weights[WEIGHT].astype(matrix.dtype))
