"""Peak host memory of loading and converting: at most twice the largest tensor, beside weights that stay on the host."""

import gc
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icejax.checkpoint import convert, load, load_model
from icejax.checkpoint.quantized.layouts import QuantizedMatrix
from icejax.checkpoint.quantized.rounding import METHODS
from icejax.checkpoint.readers import huggingface
from tests.helpers import families
from tests.helpers.checkpoints import edit
from tests.helpers.peak import resident_peak

SIZES = dict(num_hidden_layers=2, hidden_size=512, vocab_size=256)
# Family row, sizes, and the format that matrices are rounded to or experts stored in. The largest tensor has about 4M numbers.
CASES = {
    "plain": ("llama-gqa", dict(intermediate_size=8192), None),
    "experts": ("qwen3_moe-plain", dict(num_local_experts=16, moe_intermediate_size=512), None),
    "fused": ("phi3-window", dict(intermediate_size=4096), None),
    "fused experts": ("mistral4-plain", dict(n_routed_experts=16, moe_intermediate_size=256), None),
    "turned experts": ("gpt_oss-plain", dict(num_local_experts=16, intermediate_size=256), None),
    "rounded": ("llama-gqa", dict(intermediate_size=8192), "int4"),
    "rounded experts": ("qwen3_moe-plain", dict(num_local_experts=16, moe_intermediate_size=512), "int4"),
    "rounded turned experts": ("gpt_oss-plain", dict(num_local_experts=16, intermediate_size=256, head_dim=32), "int4"),
    "experts of blocks": ("gpt_oss-plain", dict(num_local_experts=64, intermediate_size=128), "mxfp4"),
}
BY_DEFAULT = "turned experts"
EACH_CASE = pytest.mark.parametrize("case", [pytest.param(x, marks=() if x == BY_DEFAULT else pytest.mark.slow) for x in CASES])
PYTHON, PROGRAMS, ORBAX = 2e6, 6e7, 8e7  # allowances in bytes: other objects, JAX programs, Orbax


def folder(case: str, path, dtype="bfloat16", **changes):
    """Writes the folder of a case; returns the bytes of its largest tensor."""
    name, sizes, _ = CASES[case]
    model = families.build(families.row(name), **SIZES | sizes | changes)
    families.save(getattr(model, dtype)(), path)
    if CASES[case][2] == "mxfp4":
        families.edit_config(
            path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "lm_head"]}
        )
        edit(path, blocks)
    return max(huggingface.size(shape, kind) for _, _, shape, kind in huggingface.keys(huggingface.shards(path)))


def size_of(parameter: np.ndarray | QuantizedMatrix) -> int:
    """Returns the bytes of a parameter."""
    if isinstance(parameter, QuantizedMatrix):
        return sum(size_of(x) for x in parameter[:3] if x is not None)
    return parameter.nbytes


def blocks(tensors: dict[str, np.ndarray]) -> None:
    """Replaces experts by mxfp4 blocks of zeros."""
    for key in [key for key in tensors if key.endswith("_proj") and ".experts." in key]:
        count, columns, rows = tensors.pop(key).shape
        tensors[f"{key}_blocks"] = np.zeros((count, rows, columns // 32, 16), np.uint8)
        tensors[f"{key}_scales"] = np.full((count, rows, columns // 32), 127, np.uint8)


def numpy_peak(run) -> int:
    """Returns the peak bytes that Python and numpy allocate during a second call of `run`."""
    run()
    thresholds = gc.get_threshold()
    gc.set_threshold(2000, 10, 10)  # as in use: the test suite collects garbage less often
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.set_threshold(*thresholds)


@EACH_CASE
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_weights_go_to_a_device_one_by_one(case, dtype, tmp_path, monkeypatch):
    """The device has its own memory: arrays put there no longer count on the host. Each load reads every tensor once."""
    stored, read_keys, put_bytes = folder(case, tmp_path), [], []
    read_tensor = huggingface.read_tensor
    monkeypatch.setattr(huggingface, "read_tensor", lambda file, key: (read_keys.append(key), read_tensor(file, key))[1])
    monkeypatch.setattr(jax, "device_put", lambda x: jnp.zeros(()))
    to_device = load._to_device
    monkeypatch.setattr(load, "_to_device", lambda x, **by: (put_bytes.append(size_of(x)), to_device(x, **by))[1])
    quantize = CASES[case][2] if CASES[case][2] in METHODS else None
    peak = numpy_peak(lambda: load_model(tmp_path, dtype=dtype, quantize=quantize))
    largest = max(stored, *put_bytes)
    print(f"peak {peak / largest:.3f} of the largest tensor")
    assert largest > 4e6 and 0.9 * largest < peak < 2 * largest + PYTHON
    assert len(read_keys) == 2 * len(set(read_keys))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][2] is None])
def test_a_process_holds_the_weights_and_two_tensors(case, tmp_path):
    """On a CPU, whose device memory is host memory."""
    stored = folder(case, tmp_path, num_hidden_layers=4, hidden_size=1024)
    leaves = [leaf.nbytes for leaf in jax.tree.leaves(load_model(tmp_path, dtype="float32"))]
    peak = resident_peak(f"icejax.checkpoint.load_model({str(tmp_path)!r}, dtype='float32')")
    largest = max(stored, *leaves)
    print(f"peak {(peak - sum(leaves)) / largest:.3f} of the largest tensor beside the weights")
    assert 0.9 * sum(leaves) < peak < sum(leaves) + 2 * largest + PROGRAMS


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "experts", "fused experts", "rounded"])
def test_a_conversion_holds_two_tensors(case, tmp_path):
    quantize, names = CASES[case][2], ("hf", "orbax", "back")
    largest = folder(case, tmp_path / "hf")
    for run, source, target in zip((convert.hf_to_orbax, convert.orbax_to_hf), names, names[1:], strict=False):
        options = dict(quantize=quantize if source == "hf" else None, force=True)
        peak = numpy_peak(
            lambda run=run, source=source, target=target, options=options: run(tmp_path / source, tmp_path / target, **options)
        )
        print(f"{source}: peak {peak / largest:.3f} of the largest tensor")
        assert peak < 2 * largest + PYTHON


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "experts", "fused experts"])
def test_a_process_that_converts_holds_few_tensors(case, tmp_path):
    largest = folder(case, tmp_path / "hf", num_hidden_layers=6, hidden_size=1024)
    for run, source, target in (("hf_to_orbax", "hf", "orbax"), ("orbax_to_hf", "orbax", "back")):
        where = ", ".join(f"__import__('pathlib').Path({str(tmp_path / x)!r})" for x in (source, target))
        peak = resident_peak(f"icejax.checkpoint.convert.{run}({where})")
        print(f"{source}: peak {peak / largest:.3f} of the largest tensor")
        assert peak < 2 * largest + ORBAX
