"""Tensors are read into memory that JAX on a CPU takes over: a weight is in memory once."""

import jax
import ml_dtypes
import numpy as np
import pytest

from icejax.checkpoint import aligned, load_model
from icejax.checkpoint.readers import huggingface
from tests.helpers import families


def test_a_stored_weight_is_the_model_s_weight(tmp_path, monkeypatch):
    families.save(families.build(families.row("llama-gqa")), tmp_path)
    addresses, read_tensor = set(), huggingface.read_tensor

    def read(file, key):
        tensor = read_tensor(file, key)
        addresses.add(tensor.ctypes.data)
        return tensor

    monkeypatch.setattr(huggingface, "read_tensor", read)
    leaves = jax.tree.leaves(load_model(tmp_path, dtype="float32"))
    assert len(leaves) > 10 and {leaf.unsafe_buffer_pointer() for leaf in leaves} <= addresses


@pytest.mark.parametrize("shape", [(), (7,), (3, 5)])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_a_cast_keeps_values_and_is_aligned(shape, dtype):
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape[::-1]).T
    cast = aligned.cast(values.astype(np.float64), np.dtype(dtype))
    assert cast.dtype == dtype and cast.shape == shape and cast.ctypes.data % 64 == 0 and cast.flags.c_contiguous
    np.testing.assert_array_equal(cast.astype(int), values)
    assert aligned.cast(cast, cast.dtype) is cast


def test_a_file_that_ends_early_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "model.safetensors"
    huggingface.write(tmp_path, {"x": ((4, 4), "F32")}, [("x", 0, np.ones((4, 4), np.float32))])
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(huggingface.InputError, match="not a whole safetensors file"):
        huggingface.read_tensor(file, "x")
    monkeypatch.setattr(huggingface, "_open", lambda file: open(file))  # the file is cut after its check
    with pytest.raises(huggingface.InputError, match="ends within x"):
        huggingface.read_tensor(file, "x")
