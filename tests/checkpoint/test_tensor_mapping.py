"""Mapping checkpoint tensors to parameters: experts are stacked, fused tensors split, and conversion back is bit-exact."""

import logging

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from icejax.checkpoint import load_model
from icejax.checks.errors import InputError
from tests.helpers import families
from tests.helpers.checkpoints import convert, edit, same_arrays

MIXTURES = (
    "qwen2_moe-plain",
    "glm4_moe-plain",
    "qwen3_moe-dense-layers",
    "mixtral-plain",
    "minimax_m2-plain",
    "mistral4-plain",
    "deepseek_v2-lite",
    "deepseek_v3-yarn",
    "glm4_moe_lite-plain",
    "gpt_oss-plain",
    "gemma4_text-experts",
    "phi3-long",
)
ROUTER, EXPERT = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.7.up_proj.weight"


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_round_trip_is_bit_exact(name, tmp_path):
    model = families.build(families.row(name)).to(torch.bfloat16)
    for key, buffer in model.named_buffers():  # published checkpoints have it in fp32
        if key.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()
    model.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    assert convert("hf_to_orbax", [str(tmp_path / "hf"), str(tmp_path / "orbax")]) == 0
    assert convert("orbax_to_hf", [str(tmp_path / "orbax"), str(tmp_path / "back")]) == 0
    stored, back = {}, load_file(tmp_path / "back" / "model.safetensors")
    for shard in (tmp_path / "hf").glob("*.safetensors"):
        stored |= load_file(shard)
    assert stored.keys() == back.keys() and len(stored) > 20
    assert any(tensor.dtype == np.float32 for tensor in stored.values()) == name.startswith(("glm", "minimax", "deepseek_v3"))
    for key in stored:
        assert stored[key].dtype == back[key].dtype
        np.testing.assert_array_equal(stored[key].view(np.uint8), back[key].view(np.uint8))
    assert same_arrays(load_model(tmp_path / "hf"), load_model(tmp_path / "orbax"))


def test_what_stands_in_one_tensor_is_taken_apart(tmp_path):
    """gpt-oss has transposed matrices with interleaved gate and up columns; Phi-3 concatenates q, k and v rows."""
    theirs = families.build(families.row("gpt_oss-plain"), num_hidden_layers=1)
    ours = families.load(theirs, tmp_path / "gpt_oss").model.layers[0].mlp.experts
    stored = {key: tensor.numpy() for key, tensor in theirs.model.layers[0].mlp.experts.state_dict().items()}
    for first_column, part in enumerate((ours.gate_proj, ours.up_proj)):
        np.testing.assert_array_equal(part.weight[...], stored["gate_up_proj"][:, :, first_column::2].swapaxes(1, 2))
        np.testing.assert_array_equal(part.bias[...], stored["gate_up_proj_bias"][:, first_column::2])
    np.testing.assert_array_equal(ours.down_proj.weight[...], stored["down_proj"].swapaxes(1, 2))
    theirs = families.build(families.row("phi3-long"), num_hidden_layers=1)
    attention = families.load(theirs, tmp_path / "phi3").model.layers[0].self_attn
    qkv = np.concatenate([part.weight[...] for part in (attention.q_proj, attention.k_proj, attention.v_proj)])
    np.testing.assert_array_equal(qkv, theirs.model.layers[0].self_attn.qkv_proj.weight.detach().numpy())


def test_layers_behind_the_last_are_passed_over(tmp_path, caplog):
    """Layers that predict further tokens are skipped with a log line, as many as the config says; one more is an error."""
    families.save(families.build(families.row("glm4_moe-plain")), tmp_path)
    edit(
        tmp_path, lambda t: t.update({"model.layers.3.mlp.gate.weight": t[ROUTER].copy(), "model.layers.3.x": t[ROUTER].copy()})
    )
    with caplog.at_level(logging.INFO, logger="icejax"):
        load_model(tmp_path)
    skipped = "model.layers.3.mlp.gate.weight; model.layers.3.x"
    assert caplog.messages == [f"2 tensors hold no parameter and are skipped: {skipped}"]
    edit(tmp_path, lambda t: t.update({"model.layers.4.mlp.gate.weight": t[ROUTER].copy()}))
    with pytest.raises(InputError, match=r": model\.layers\.4\.mlp\.gate\.weight is not a parameter of this model$"):
        load_model(tmp_path)


def test_a_bias_of_choice_stays_fp32(tmp_path):
    """In bf16 the router would choose other experts."""
    model = families.load(families.build(families.row("glm4_moe-plain")), tmp_path / "hf")
    bias = np.asarray(model.model.layers[1].mlp.gate.e_score_correction_bias[...])
    assert (bias.astype(np.float16) != bias).any()
    assert convert("hf_to_orbax", [str(tmp_path / "hf"), str(tmp_path / "orbax")]) == 0
    for folder in ("hf", "orbax"):
        gate = load_model(tmp_path / folder, dtype="bfloat16").model.layers[1].mlp.gate
        assert gate.weight.get_value().codes.dtype == "uint16" and gate.e_score_correction_bias[...].dtype == "float32"
        np.testing.assert_array_equal(gate.e_score_correction_bias[...], bias)


FAULTS = {
    "router missing": (lambda t: t.pop(ROUTER), f"{ROUTER} is missing"),
    "router misshapen": (lambda t: t.update({ROUTER: t[ROUTER][:7]}), f"{ROUTER} has shape [7, 64], expected [8, 64]"),
    "expert missing": (lambda t: t.pop(EXPERT), f"{EXPERT} is missing"),
    "expert misshapen": (lambda t: t.update({EXPERT: t[EXPERT].T.copy()}), f"{EXPERT} has shape [64, 16], expected [16, 64]"),
    "expert beyond": (
        lambda t: t.update({EXPERT.replace(".7.", ".8."): t[EXPERT].copy()}),
        "model.layers.1.mlp.experts.8.up_proj.weight is not a parameter of this model",
    ),
    "experts in a dense layer": (
        lambda t: t.update({EXPERT.replace("layers.1", "layers.0"): t[EXPERT].copy()}),
        "model.layers.0.mlp.experts.7.up_proj.weight is not a parameter of this model",
    ),
    "two dtypes": (
        lambda t: t.update({EXPERT: t[EXPERT].astype(np.float16)}),
        "model.layers.1.mlp.experts.0.up_proj.weight to model.layers.1.mlp.experts.7.up_proj.weight are stored in F16 and F32: "
        "expected one dtype",
    ),
}


def test_a_fault_is_told_by_the_names_of_the_checkpoint(tmp_path):
    families.save(families.build(families.row("mixtral-plain")), tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("model.layers.0.block_sparse_moe.experts.3.w3.weight"))
    with pytest.raises(InputError, match=r": model\.layers\.0\.block_sparse_moe\.experts\.3\.w3\.weight is missing$"):
        load_model(tmp_path)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_routers_and_experts_is_one_line(fault, tmp_path):
    change, message = FAULTS[fault]
    families.save(families.build(families.row("qwen3_moe-dense-layers")), tmp_path)
    edit(tmp_path, change)
    with pytest.raises(InputError) as error:
        load_model(tmp_path)
    assert str(error.value) == f"{tmp_path} does not fit its config.json: {message}"
