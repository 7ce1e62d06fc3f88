"""Orbax folders are read by slices and written by the devices of a mesh, and hold what one device writes."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from icejax.checkpoint import boxes, convert, load
from icejax.checkpoint.gguf.metadata import Tensor
from icejax.checkpoint.gguf.numbers import read_numbers
from icejax.checkpoint.readers import orbax
from icejax.checkpoint.tensors import stored_tensors
from icejax.commands import convert as command
from icejax.models import sharding
from icejax.runtime import processes
from icejax.runtime.mesh import Mesh
from tests.helpers.on_devices import LLAMA, checkpoint

WIDE = LLAMA | dict(hidden_size=64, intermediate_size=32768, num_hidden_layers=1)  # matrices of 8.4 MB


def read_of_files() -> int:
    """Returns the bytes that tensorstore has read of files in this process."""
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


def made(raw, folder):
    """Writes a Hugging Face folder, and returns it."""
    folder.mkdir()
    return checkpoint(raw, folder)


def size_of(folder) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def in_one_process(count: int) -> types.SimpleNamespace:
    """Returns a mesh of `count` devices that are all this process's one device."""
    flat = jax.devices()[:1] * count
    return types.SimpleNamespace(size=count, devices=types.SimpleNamespace(devices=types.SimpleNamespace(flat=flat)))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A Hugging Face folder, and the icejax folder made of it."""
    folder = tmp_path_factory.mktemp("wide")
    convert.hf_to_orbax(made(WIDE, folder / "hf"), folder / "orbax")
    return folder / "hf", folder / "orbax"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A Hugging Face folder, and the icejax folder made of it."""
    folder = tmp_path_factory.mktemp("small")
    convert.hf_to_orbax(made(LLAMA | dict(num_hidden_layers=1), folder / "hf"), folder / "orbax")
    return folder / "hf", folder / "orbax"


@pytest.mark.parametrize(
    ("shape", "item", "chunk"),
    [
        ((), 4, ()),
        ((7,), 4, (7,)),
        ((16, 8), 4, (2, 8)),
        ((4096, 8192), 2, (512, 1024)),
        ((3, 4096, 100), 2, (1, 512, 100)),
        ((32, 5760, 90, 16), 1, (1, 720, 90, 16)),
        ((1, 1), 4, (1, 1)),
        ((9, 0), 4, (2, 1)),
    ],
)
def test_a_chunk_has_an_eighth(shape, item, chunk):
    assert boxes.chunk_shape(shape, item) == chunk


def test_a_box_reads_its_chunks_alone(tmp_path):
    x = np.random.default_rng(0).integers(0, 2**63, (1024, 1024))  # does not compress
    about = {key: (x.shape, "I64") for key in ("new", "old")}
    orbax.save(tmp_path / "new", about, [(key, 0, x) for key in about], most_bytes=x.nbytes)
    tensor = orbax.stored(tmp_path / "new")["new"]
    assert tensor.in_boxes and tensor.dtype == x.dtype
    for box in (np.s_[128:256, 0:1024], np.s_[0:1024, 512:640], np.s_[384:640, 256:512]):
        before = read_of_files()
        part = orbax.read(tmp_path / "new", "new", tensor, box)
        np.testing.assert_array_equal(part, x[box])
        assert 0 <= read_of_files() - before - part.nbytes < 2**16  # and the index of the chunks, once


def test_a_folder_of_one_chunk_per_tensor_is_read_whole(small, tmp_path, monkeypatch):
    """As icejax wrote it until now: its tensors are cut after they are read."""
    monkeypatch.setattr(boxes, "chunk_shape", lambda shape, item: tuple(shape))
    convert.hf_to_orbax(small[0], tmp_path / "old")
    stored = dict(stored_tensors(tmp_path / "old"))
    assert {len(tensor.shape) for tensor in stored.values() if not tensor.in_boxes} == {2}
    assert {len(tensor.shape) for tensor in stored.values() if tensor.in_boxes} == {1}


def test_a_process_reads_its_share_of_an_orbax_folder(wide, monkeypatch):
    """Of two processes with four devices each. Beside half of the chunks they read norms, small matrices and the index."""
    _, folder = wide
    own, shares = [], []

    def put(key, shape, share, mesh, *, groups):
        for device in own:
            before = read_of_files()
            part = share(device)
            shares.append((part.nbytes, read_of_files() - before))
        return jnp.zeros(())

    monkeypatch.setattr(load, "read_mesh", Mesh)
    monkeypatch.setattr(sharding, "put", put)
    for own[:] in (range(4), range(4, 8)):
        before = read_of_files()
        load.load_model(folder, dtype="float32", mesh=8)
        assert read_of_files() - before < 0.53 * size_of(folder)
    largest = 32768 * 64 * 4 // 8
    assert max(size for size, _ in shares) == largest
    assert all(read < largest for size, read in shares if size == largest)


@pytest.mark.parametrize(
    ("to", "quantize", "count"),
    [
        ("orbax", None, 16),
        ("hf", None, 3),
        pytest.param("hf", "int8", 3, marks=pytest.mark.slow),
        pytest.param("orbax", "fp8", 8, marks=pytest.mark.slow),
        pytest.param("orbax", "int4", 3, marks=pytest.mark.slow),
    ],
)
def test_devices_write_what_one_writes(small, tmp_path, monkeypatch, to, quantize, count):
    """Three devices do not divide the eighths of a tensor, and of sixteen eight have rows."""
    monkeypatch.setattr(convert, "_mesh", lambda count: count and in_one_process(count))
    function, source = (convert.hf_to_orbax, small[0]) if to == "orbax" else (convert.orbax_to_hf, small[1])
    for name, mesh in (("one", None), ("several", count)):
        function(source, tmp_path / name, quantize=quantize, mesh=mesh)
    files = ("config.json",) if to == "orbax" else ("config.json", "model.safetensors")
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "several" / name).read_bytes()
    one, several = (dict(stored_tensors(tmp_path / name)) for name in ("one", "several"))
    assert one.keys() == several.keys()
    for key, tensor in one.items():
        assert (tensor.shape, tensor.dtype) == (several[key].shape, several[key].dtype)
        np.testing.assert_array_equal(tensor.read(), several[key].read(), err_msg=key)
    assert size_of(tmp_path / "several") < 1.5 * size_of(tmp_path / "one") + 2**17  # no chunk is written twice


def test_rows_of_interleaved_heads_are_read_in_parts(tmp_path):
    """The devices of a conversion cut a GGUF file's heads, whose rows are interleaved."""
    x = np.random.default_rng(0).standard_normal((32, 5)).astype(np.float32)
    (tmp_path / "x").write_bytes(x.tobytes())
    tensor = Tensor(tmp_path / "x", "F32", x.shape, 0, x.nbytes)
    whole = read_numbers(tensor, heads=4)
    np.testing.assert_array_equal(whole[:8], x[[0, 2, 4, 6, 1, 3, 5, 7]])
    for box in (np.s_[3:6, 0:5], np.s_[6:17, 1:4], np.s_[8:16, 0:5], np.s_[30:32, 0:5]):
        np.testing.assert_array_equal(read_numbers(tensor, heads=4, box=box), whole[box])


def test_a_device_holds_its_rows_alone(wide, tmp_path, monkeypatch):
    source, sizes, read = wide[0], [], boxes.read

    def counted(*arguments):
        sizes.append((array := read(*arguments)).nbytes)
        return array

    monkeypatch.setattr(boxes, "read", counted)
    monkeypatch.setattr(convert, "_mesh", in_one_process)
    convert.hf_to_orbax(source, tmp_path / "orbax", mesh=8)
    assert max(sizes) == 32768 * 64 * 4 // 8 and sum(sizes) < (source / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "heads=3"], "mesh heads=3 needs 3 devices and JAX finds 1: set "
         "XLA_FLAGS=--xla_force_host_platform_device_count=3"),
        (["--mesh", "tokens=2"], "mesh must be heads=N, for N devices that share the KV heads, or heads=N,tokens=M, for M devices to each KV head, got 'tokens=2'"),
        (["--coordinator", "a:1"], "unrecognized arguments: --coordinator a:1"),
    ],
)  # fmt: skip
def test_a_mesh_that_cannot_be_is_refused(wide, tmp_path, capsys, options, message):
    try:
        status = command.main([str(wide[0]), str(tmp_path / "x"), *options], name="icejax convert")
    except SystemExit as end:
        status = end.code
    assert (status, capsys.readouterr().err) == (2, f"icejax convert: error: {message}\n")
    assert not (tmp_path / "x").exists()


def test_a_conversion_runs_in_one_process(wide, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(convert, "read_mesh", Mesh)
    with pytest.raises(load.InputError) as error:
        convert.hf_to_orbax(wide[0], tmp_path / "x", mesh=2)
    assert str(error.value) == "a conversion runs in one process: leave its group"
