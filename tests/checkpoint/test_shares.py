"""A device's share of a parameter is that box of the whole, in every layout, and no more of the files is read."""

import io
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from icejax.checkpoint import boxes, load, shares
from icejax.checkpoint.boxes import Box
from icejax.checkpoint.quantized import formats
from icejax.checkpoint.quantized.rounding import METHODS
from icejax.checkpoint.tensor_mapping import TensorMapping
from icejax.checkpoint.tensors import Stored, Tensors
from icejax.models import sharding
from icejax.ops.quantized.products import Grouped
from icejax.runtime.mesh import Mesh
from tests.checkpoint.test_layouts import _numpy
from tests.helpers.on_devices import LLAMA, checkpoint
from tests.helpers.quantised import FORMATS

SHAPE = (192, 320)  # blocks and words of all layouts divide its halves
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"  # cut by rows and by columns
DENSE = dict(dtype=np.dtype(np.float32), codes=False, on_cpu=False)


class Reads(list):
    """The bytes of each read, and tensors in memory whose reads it counts."""

    def of(self, array: np.ndarray) -> Stored:
        def read(box: Box | None = None) -> np.ndarray:
            part = array if box is None else array[box]
            self.append(part.nbytes)
            return part

        return Stored(array.shape, "F32", read)


def coded(key: str, format, arrays: dict[str, np.ndarray], reads: Reads, shape: tuple[int, int] = SHAPE) -> Tensors:
    """Returns a matrix of codes as the tensors of a folder."""
    sources = formats.sources({"quantization_config": format.config}, {key: shape})
    stored = {f"{key.removesuffix('weight')}{name}": reads.of(array) for name, array in arrays.items()}
    return Tensors("", {key: TensorMapping((key,), shape)}, sources, stored)


@pytest.mark.parametrize("name", FORMATS)
def test_a_share_of_codes_is_that_of_the_whole(name):
    format, rng = FORMATS[name], np.random.default_rng(0)
    arrays = {k: _numpy(x) for k, x in format.write(rng.standard_normal(SHAPE).astype(np.float32)).items()}
    torches = format.write(np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32))
    expected = format.read(torches, SHAPE)
    for key in (UP, DOWN):
        reads = Reads()
        tensors = coded(key, format, arrays, reads)
        assert shares.are_readable(tensors, key, sharding.cut_axis(key))
        for count in (2, 4):  # the quarters are cut within blocks and words
            for device in range(count):
                box = sharding.box(key, SHAPE, Mesh(count), device)
                np.testing.assert_allclose(shares.read(tensors, key, box, **DENSE), expected[box], rtol=1e-6, atol=1e-6)
        for on_cpu in (False, True):
            whole = shares.read(tensors, key, None, dtype=None, codes=True, on_cpu=on_cpu)
            grouped, groups = Grouped(*whole[:3], by_row=on_cpu), shares.groups(tensors, key)
            assert grouped.scale.shape[1 if on_cpu else 0] == groups
            for device in range(2):
                part = sharding.share_of(key, grouped, Mesh(2), device)
                share = shares.read(
                    tensors, key, sharding.box(key, SHAPE, Mesh(2), device), dtype=None, codes=True, on_cpu=on_cpu
                )
                for ours, theirs in zip(share[:3], (part.codes, part.scale, part.zero), strict=True):
                    assert (ours is None and theirs is None) or np.array_equal(ours, theirs)
        del reads[:]
        for device in range(2):
            shares.read(tensors, key, sharding.box(key, SHAPE, Mesh(2), device), **DENSE)
        largest = max(array.nbytes for array in arrays.values())
        assert max(reads) == largest // 2 and sum(reads) <= sum(array.nbytes for array in arrays.values()) + largest // 4


def test_groups_of_a_share_are_those_of_the_whole():
    """Blocks of 40 columns do not divide 300, so groups have 20, and a fifth of the columns is one block and a half."""
    format, shape = FORMATS["fp8-blocks"], (32, 300)
    arrays = {k: _numpy(x) for k, x in format.write(np.random.default_rng(0).standard_normal(shape).astype(np.float32)).items()}
    tensors = coded(DOWN, format, arrays, Reads(), shape)
    whole, *parts = (
        shares.read(tensors, DOWN, box, dtype=None, codes=True, on_cpu=True)
        for box in (None, *(sharding.box(DOWN, shape, Mesh(5), device) for device in range(5)))
    )
    assert shares.groups(tensors, DOWN) == 15
    assert np.array_equal(np.concatenate([part.codes for part in parts], axis=1), whole.codes)
    assert np.array_equal(np.concatenate([part.scale for part in parts], axis=1), whole.scale)


def test_shares_of_tensors_that_hold_several_matrices():
    rng = np.random.default_rng(0)
    fused, experts = (rng.standard_normal(shape).astype(np.float32) for shape in ((24, 4), (3, 8, 4)))
    kinds = {
        "q_proj.weight": (TensorMapping(("x",), (24, 4), rows=slice(0, 16)), fused[:16]),
        "k_proj.weight": (TensorMapping(("x",), (24, 4), rows=slice(16, 24)), fused[16:]),
        "mlp.experts.up_proj.weight": (TensorMapping(("y",), (3, 8, 4), 3, True, slice(2, 6)), experts[:, 2:6]),
        "mlp.experts.down_proj.weight": (TensorMapping(("0", "1", "2"), (8, 4), 3), experts),
    }
    reads = Reads()
    stored = {"x": reads.of(fused), "y": reads.of(experts)} | {str(i): reads.of(x) for i, x in enumerate(experts)}
    sources = formats.sources({}, {key: x.shape for key, x in stored.items()})
    tensors = Tensors(None, {key: mapping for key, (mapping, _) in kinds.items()}, sources, stored)
    for key, (_, whole) in kinds.items():
        assert shares.are_readable(tensors, key, sharding.cut_axis(key))
        del reads[:]
        for device in range(2):
            box = sharding.box(key, whole.shape, Mesh(2), device)
            np.testing.assert_array_equal(shares.read(tensors, key, box, **DENSE), whole[box])
        assert sum(reads) == whole.nbytes


@pytest.mark.parametrize(
    ("method", "columns", "in_boxes", "readable"),
    [
        ("int8", 256, True, [True, False]),
        ("int4", 128, True, [True, False]),
        ("int4", 256, True, [True, True]),
        ("int4", 256, False, [False, False]),
    ],
)
def test_what_needs_the_whole_is_read_whole(method, columns, in_boxes, readable):
    """A row that is rounded with one scale takes it from all of its columns; older Orbax folders have whole tensors."""
    shape = (16, columns)
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    sources = formats.sources({}, {UP: shape, DOWN: shape}, rounding=METHODS[method])
    stored = {key: Reads().of(array)._replace(in_boxes=in_boxes) for key in sources}
    tensors = Tensors("", {key: TensorMapping((key,), shape) for key in sources}, sources, stored)
    assert [shares.are_readable(tensors, key, sharding.cut_axis(key)) for key in (UP, DOWN)] == readable
    for key in (key for key, is_readable in zip((UP, DOWN), readable, strict=True) if is_readable):
        codes = dict(dtype=None, codes=True, on_cpu=True)
        whole, box = shares.read(tensors, key, None, **codes), sharding.box(key, shape, Mesh(2), 1)
        share, place = shares.read(tensors, key, box, **codes), np.s_[8:] if key == UP else np.s_[:, 1:]
        assert np.array_equal(share.codes, whole.codes[place]) and np.array_equal(share.scale, whole.scale[place])


def test_a_box_of_a_file_is_read_alone():
    array = np.random.default_rng(0).integers(0, 9, (4, 6, 5)).astype(np.int16)
    content, count = b"before" + array.tobytes() + b"behind", []

    class Stream(io.BytesIO):
        def readinto(self, view) -> int:
            count.append(super().readinto(view[:7]))  # a file may give fewer bytes than asked
            return count[-1]

    for box in ((slice(0, 4), slice(0, 6), slice(0, 5)), (slice(1, 3), slice(0, 6), slice(0, 5)),
                (slice(0, 4), slice(2, 5), slice(0, 5)), (slice(1, 4), slice(3, 4), slice(1, 3)), (slice(2, 2), slice(0, 6), slice(0, 5))):  # fmt: skip
        del count[:]
        np.testing.assert_array_equal(boxes.read(Stream(content), 6, array.shape, array.dtype, box), array[box])
        assert sum(count) == array[box].nbytes
    with pytest.raises(EOFError):
        boxes.read(Stream(content[:-20]), 6, array.shape, array.dtype)


def test_a_process_reads_each_share_alone_and_holds_one(tmp_path, monkeypatch):
    """Of a model on eight devices, whose memory is not the host's."""
    folder = checkpoint(LLAMA | dict(hidden_size=64, intermediate_size=32768, num_hidden_layers=1), tmp_path)
    largest, sizes = 32768 * 64 * 4, []
    read = boxes.read

    def counted(*arguments):
        sizes.append((array := read(*arguments)).nbytes)
        return array

    def put(key, shape, share, mesh, *, groups):
        for device in range(mesh.heads):
            share(device)
        return jnp.zeros(())

    monkeypatch.setattr(load, "read_mesh", Mesh)
    monkeypatch.setattr(sharding, "put", put)
    monkeypatch.setattr(boxes, "read", counted)
    tracemalloc.start()
    try:
        load.load_model(folder, dtype="float32", mesh=8)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(sizes) == sum(x.nbytes for x in load_file(folder / "model.safetensors").values())
    assert max(sizes) == largest // 8 and peak < largest / 2
