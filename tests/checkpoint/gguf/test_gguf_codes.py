"""GGUF's types that stay codes: each weight is what the `gguf` package makes of its bits, and models of codes give its logits."""

import logging
import re

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

from icejax.cache.registry import Full
from icejax.checkpoint import load_model
from icejax.checkpoint.gguf.codes import TYPES, Blocks
from icejax.checkpoint.tensor_mapping import TensorMapping
from icejax.ops.quantized.products import Grouped, at_once, by_blocks, rows
from tests import tolerances
from tests.helpers import families, gguf_files
from tests.helpers.run import all_logits, greedy, jitted

ROWS, COLUMNS = 5, 512
# Type -> dtype of the codes, and whether there is an offset.
FORMS = {
    "Q4_0": ("int4", False), "Q4_1": ("int4", True), "Q5_0": ("int8", False), "Q5_1": ("int8", True), "Q8_0": ("int8", False),
    "Q4_K": ("int4", True), "Q5_K": ("int8", True), "Q6_K": ("int8", False), "IQ4_NL": ("int8", False), "IQ4_XS": ("int8", False),
    "MXFP4": ("float4_e2m1fn", False),
}  # fmt: skip
GPT_OSS = dict(
    swiglu_limit=7.0, swiglu_alpha=1.702, layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2
)  # fmt: skip
# Of these types the package writes none: the blocks are random.
BLOCKS_OF_256 = dict(hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)


@pytest.fixture(autouse=True)
def no_tokenizers(monkeypatch):
    gguf_files.without_tokenizers(monkeypatch)


def random_blocks(kind: str) -> np.ndarray:
    """Returns the bytes of a matrix [ROWS, COLUMNS] of any codes and ordinary scales; the first rows have scales of 0."""
    stored = gguf_files.random_blocks(kind, (ROWS, COLUMNS))
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if FORMS[kind][1]:
        stored.reshape(-1, size)[: COLUMNS // block, 0:2] = 0
    if kind == "MXFP4":
        blocks = stored.reshape(-1, size)
        blocks[:, 0] = np.random.default_rng(1).integers(110, 140, len(blocks))
    return stored


@pytest.mark.parametrize("kind", FORMS)
def test_codes_are_the_weights_that_the_package_makes(kind):
    """To the bit without an offset; with one, to the rounding of float32 beside the offset."""
    stored = random_blocks(kind)
    expected = quants.dequantize(stored, GGMLQuantizationType[kind])
    matrix = Blocks(kind=kind).codes((ROWS, COLUMNS), {"weight": stored})
    codes, offset = FORMS[kind]
    assert matrix.codes.dtype == (np.int8 if codes == "int4" else codes) and (matrix.zero is not None) == offset
    if codes == "int4":
        assert matrix.bits == 4 and matrix.codes.min() == -8 and matrix.codes.max() == 7
    if not offset:
        np.testing.assert_array_equal(matrix.weights(), expected)
        return
    largest = np.abs(matrix.scale) * (32 + np.abs(matrix.zero))
    off = np.abs(matrix.weights() - expected).reshape(*matrix.scale.shape, -1).max(-1)
    assert (off <= 2.0**-23 * largest).all() and not np.isnan(matrix.zero).any()


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "MXFP4"])
@pytest.mark.parametrize("count", [1, 40])
def test_products_with_codes_equal_float64(kind, count):
    """Products of one row multiply codes, those of many multiply weights."""
    stored = random_blocks(kind)
    mapping = TensorMapping(("x",), (ROWS, COLUMNS))
    matrix = Blocks(kind=kind).codes((ROWS, COLUMNS), {"weight": stored})
    for on_cpu, multiply in ((True, by_blocks), (False, at_once)):
        parts = mapping.join([matrix], dtype=np.dtype(np.float32), codes=True, on_cpu=on_cpu)
        grouped = Grouped(*(None if part is None else jnp.asarray(part) for part in parts[:3]), by_row=on_cpu)
        x = np.random.default_rng(1).standard_normal((count, COLUMNS)).astype(np.float32)
        expected = x.astype(np.float64) @ quants.dequantize(stored, GGMLQuantizationType[kind]).astype(np.float64).T
        scale = np.abs(x).astype(np.float64) @ np.abs(matrix.weights()).astype(np.float64).T
        assert (np.abs(jitted(multiply, x, grouped) - expected) <= 1e-5 * scale.max()).all()


def reference(model, prompt) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0].numpy()


@pytest.mark.parametrize(
    "name, kind, changes",
    [
        ("llama-gqa", "Q4_0", {}),
        ("qwen3_moe-plain", "MXFP4", dict(head_dim=16, moe_intermediate_size=32)),
        pytest.param("llama-mqa-tied", "Q4_1", {}, marks=pytest.mark.slow),
        pytest.param("qwen2-plain", "Q5_1", {}, marks=pytest.mark.slow),
        pytest.param("phi3-window", "Q8_0", {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss-plain", "MXFP4", GPT_OSS, marks=pytest.mark.slow),
        pytest.param("gpt_oss-plain", "Q4_1", GPT_OSS, marks=pytest.mark.slow),
        pytest.param("llama-gqa", "Q4_K", BLOCKS_OF_256, marks=pytest.mark.slow),
        pytest.param("qwen3-plain", "Q5_K", BLOCKS_OF_256, marks=pytest.mark.slow),
        pytest.param("qwen2-tied", "Q6_K", BLOCKS_OF_256, marks=pytest.mark.slow),
        pytest.param("qwen3-plain", "IQ4_NL", BLOCKS_OF_256, marks=pytest.mark.slow),
        pytest.param("mistral-window", "IQ4_XS", BLOCKS_OF_256, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_models_of_codes_have_transformers_logits(name, kind, changes, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    theirs, prompt = families.build(families.row(name), **changes), families.tokens(150)
    ours = load_model(gguf_files.write(theirs, tmp_path / "model.gguf", kind))
    weight = ours.model.embed_tokens.weight.get_value()
    assert isinstance(weight, Grouped) and "are dequantised as they are read:" not in caplog.text
    assert "matrices stored in GGUF's types" in caplog.text
    np.testing.assert_allclose(all_logits(ours, prompt, Full()), reference(theirs, prompt), rtol=0, atol=tolerances.LOGITS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, kind", [("llama-gqa", "Q2_K"), ("qwen2-plain", "Q3_K"), ("qwen3-plain", "IQ3_S"), ("llama-gqa", "IQ2_XXS")]
)
def test_types_that_do_not_stay_codes_are_dequantised_and_told(name, kind, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    theirs, prompt = families.build(families.row(name), **BLOCKS_OF_256), families.tokens(150)
    ours = load_model(gguf_files.write(theirs, tmp_path / "model.gguf", kind))
    assert not isinstance(ours.model.embed_tokens.weight.get_value(), Grouped)
    assert re.search(rf"model.gguf: tensors are dequantised as they are read: \d+ in {kind}$", caplog.text, re.MULTILINE)
    np.testing.assert_allclose(all_logits(ours, prompt, Full()), reference(theirs, prompt), rtol=0, atol=tolerances.LOGITS)


@pytest.mark.slow
def test_experts_of_codes_in_host_memory_give_the_same_logits(tmp_path):
    theirs, prompt = families.build(families.row("qwen3_moe-plain"), head_dim=16, moe_intermediate_size=32), families.tokens(40)
    ours = load_model(gguf_files.write(theirs, tmp_path / "model.gguf", "Q4_1"), experts_on_host=3)
    np.testing.assert_allclose(all_logits(ours, prompt, Full()), reference(theirs, prompt), rtol=0, atol=tolerances.LOGITS)


def test_text_from_codes_equals_transformers(tmp_path):
    theirs, prompt = families.build(families.row("llama-gqa")), families.tokens(140, seed=1)
    ours = load_model(gguf_files.write(theirs, tmp_path / "model.gguf", "Q4_1"))
    with torch.no_grad():
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].numpy()
    np.testing.assert_array_equal(greedy(ours, Full(), [prompt], 12)[0][0], expected)


def test_four_bits_stay_four_bits_on_an_accelerator():
    assert FORMS.keys() == TYPES.keys()
    for kind, (codes, _) in FORMS.items():
        matrix = Blocks(kind=kind).codes((ROWS, COLUMNS), {"weight": random_blocks(kind)})
        mapping = TensorMapping(("x",), (ROWS, COLUMNS), experts=1)
        parts = mapping.join([matrix], dtype=np.dtype(np.float32), codes=True, on_cpu=False)
        assert parts.codes.dtype == np.dtype(getattr(ml_dtypes, codes) if "4" in codes else codes), kind


@pytest.mark.parametrize("kind", FORMS)
def test_on_a_cpu_the_same_weights_come_by_rows(kind):
    matrix = Blocks(kind=kind).codes((ROWS, COLUMNS), {"weight": random_blocks(kind)})
    parts = TensorMapping(("x",), (ROWS, COLUMNS)).join([matrix], dtype=np.dtype(np.float32), codes=True, on_cpu=True)
    grouped = Grouped(*(None if part is None else jnp.asarray(part) for part in parts[:3]), by_row=True)
    assert grouped.codes.shape == (*matrix.scale.shape, COLUMNS // matrix.scale.shape[1]) and grouped.codes.dtype == jnp.int8
    weights = (parts.codes.astype(np.float32) - (0 if parts.zero is None else parts.zero[..., None])) * parts.scale[..., None]
    np.testing.assert_array_equal(weights.reshape(ROWS, COLUMNS), matrix.weights())
    np.testing.assert_array_equal(jitted(lambda matrix: matrix.weights(jnp.float32), grouped), weights)
    np.testing.assert_array_equal(rows(grouped, jnp.asarray([[4, 0]]), "float32")[0], matrix.weights()[[4, 0]])
