"""GGUF files as files: what is refused and how, split sets, folders, the hub, and the numbers of each type."""

import os
import shutil
import struct
from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from icejax.checkpoint import load_model
from icejax.checkpoint.folder import POINTER, resolve
from icejax.checkpoint.gguf import folder as gguf_folder
from icejax.checkpoint.gguf import metadata, numbers
from icejax.checkpoint.gguf import parts as gguf_parts
from icejax.checkpoint.gguf.metadata import read_header
from icejax.checkpoint.gguf.numbers import CODES, read_numbers
from icejax.checks.errors import InputError
from icejax.commands import generate
from icejax.files import atomic_folder
from tests.helpers import families, gguf_files

HUGE = 2**60
U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


@pytest.fixture(autouse=True)
def no_tokenizers(monkeypatch):
    gguf_files.without_tokenizers(monkeypatch)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A small valid file."""
    theirs = families.build(families.row("llama-gqa"), num_hidden_layers=1, vocab_size=16)
    return gguf_files.write(theirs, tmp_path_factory.mktemp("small") / "small.gguf", "Q4_0")


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def entry(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", kind, offset)


def file_of(
    *parts: bytes, tensors: int = 0, values: int = 0, version: int = 3, magic: bytes = b"GGUF", order: str = "<", data: int = 0
) -> bytes:
    """Returns a file with these counts, whose header continues with `parts`, and then `data` bytes."""
    header = magic + struct.pack(f"{order}IQQ", version, tensors, values) + b"".join(parts)
    return header + bytes(-len(header) % 32 + data)


def value(key: str, kind: int, stored: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + stored


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


ALIGNED = {n: value("general.alignment", U32, struct.pack("<I", n)) for n in (0, 24, 64, 2**31)}
ONE = entry("a", (4,))
UNSOUND = {
    "no GGUF": (file_of(magic=b"GGML"), "is no GGUF file: it begins with b'GGML', expected b'GGUF'"),
    "empty": (b"", "is no sound GGUF file (it ends within its header): fetch it again"),
    "version 1": (file_of(version=1), "is GGUF of version 1: expected 2 or 3; fetch or convert a newer file"),
    "version 4": (file_of(version=4), "is GGUF of version 4: expected 2 or 3"),
    "big-endian": (file_of(order=">"), "is a big-endian GGUF file, which is not read: fetch or convert a little-endian one"),
    "lying tensors": (file_of(tensors=HUGE), f"(it promises {HUGE} tensors, and is too short for them)"),
    "lying values": (file_of(values=HUGE), f"(it promises {HUGE} values, and is too short for them)"),
    "lying text": (file_of(value("a", STRING, struct.pack("<Q", HUGE)), values=1), "(it ends within its value of 'a')"),
    "lying key": (file_of(struct.pack("<Q", HUGE), bytes(32), values=1), "(it ends within its keys)"),
    "lying array": (file_of(value("a", ARRAY, array(U32, HUGE)), values=1), f"(the value of 'a' promises {HUGE} items, and"),
    "lying texts": (file_of(value("a", ARRAY, array(STRING, HUGE)), values=1), f"(the value of 'a' promises {HUGE} items, and"),
    "lying item": (
        file_of(value("a", ARRAY, array(STRING, 1, struct.pack("<Q", HUGE))), values=1),
        "(it ends within its value of 'a')",
    ),
    "nested array": (file_of(value("a", ARRAY, array(ARRAY, 1, array(U32, 0))), values=1), "(the value of 'a' is an array of"),
    "unknown value": (file_of(value("a", 13, b""), bytes(8), values=1), "(the value of 'a' has the unknown type 13)"),
    "unknown items": (file_of(value("a", ARRAY, array(13, 1)), values=1), "(the value of 'a' has items of the unknown type 13)"),
    "key twice": (file_of(2 * value("a", BOOL, b"\1"), values=2), "(it has 'a' twice)"),
    "no text": (file_of(value("a", STRING, text(b"\xff")), values=1), "(its value of 'a' is no UTF-8 text)"),
    "no name": (file_of(text(b"\xff"), ONE, tensors=1), "(its tensors' names is no UTF-8 text)"),
    "alignment 0": (file_of(ALIGNED[0], values=1), "(its general.alignment must be a power of two"),
    "alignment 24": (file_of(ALIGNED[24], values=1), "(its general.alignment must be a power of two"),
    "large alignment": (file_of(ALIGNED[2**31], values=1), "(its general.alignment must be a power of two"),
    "alignment of text": (file_of(value("general.alignment", STRING, text("64")), values=1), "(its general.alignment must be"),
    "no axes": (file_of(entry("a", ()), ONE, tensors=1, data=16), "(the tensor 'a' has 0 axes)"),
    "many axes": (file_of(entry("a", (1,) * 5), tensors=1, data=16), "(the tensor 'a' has 5 axes)"),
    "lying axes": (file_of(text("a"), struct.pack("<I", 2**31), bytes(32), tensors=1), "(the tensor 'a' has 2147483648 axes)"),
    "no rows": (file_of(entry("a", (4, 0)), tensors=1, data=16), "(the tensor 'a' has shape [0, 4], which F32 in blocks of 1"),
    "huge shape": (file_of(entry("a", (HUGE, HUGE)), tensors=1, data=16), "(the tensor 'a' has shape"),
    "huge tensor": (file_of(entry("a", (HUGE,)), tensors=1, data=16), "(the tensor 'a' reaches past its end)"),
    "cut blocks": (file_of(entry("a", (40,), 2), tensors=1, data=36), "has shape [40], which Q4_0 in blocks of 32 cannot have"),
    "unknown type": (file_of(entry("a", (4,), 99), tensors=1, data=16), "(the tensor 'a' has the unknown type 99)"),
    "removed type": (file_of(entry("a", (32,), 31), tensors=1, data=18), "(the tensor 'a' has the unknown type 31)"),
    "tensor twice": (file_of(ONE, entry("a", (4,), 0, 32), tensors=2, data=64), "(it has the tensor 'a' twice)"),
    "overlap": (file_of(entry("a", (16,)), entry("b", (4,), 0, 32), tensors=2, data=64), "(the tensors 'a' and 'b' overlap)"),
    "same place": (file_of(ONE, entry("b", (4,)), tensors=2, data=64), "(the tensors 'a' and 'b' overlap)"),
    "outside": (file_of(entry("a", (4,), 0, 2**40), tensors=1, data=16), "(the tensor 'a' reaches past its end)"),
    "not aligned": (file_of(entry("a", (4,), 0, 16), tensors=1, data=64), "begins at 16, which is no multiple of 32)"),
    "ends early": (file_of(ONE, tensors=1, data=15), "(the tensor 'a' reaches past its end)"),
    "no table": (file_of(tensors=1, data=64)[:24], "(it promises 1 tensors, and is too short for them)"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSOUND)
def test_an_unsound_file_is_one_line(tmp_path, case):
    content, message = UNSOUND[case]
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(InputError) as told:
        resolve(file)
    assert str(told.value).startswith(str(file)) and message in str(told.value) and "\n" not in str(told.value)


def test_arrays_of_many_items_and_long_headers_are_refused(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(file_of(value("a", ARRAY, array(BOOL, 100, bytes(100))), values=1))
    monkeypatch.setattr(metadata, "MOST_ITEMS", 99)
    with pytest.raises(InputError, match="its arrays have more than 99 items"):
        read_header(file)
    monkeypatch.setattr(metadata, "MOST_ITEMS", 100)
    monkeypatch.setattr(metadata, "LARGEST_HEADER", 80)
    with pytest.raises(InputError, match="its value of 'a' makes the header larger than 80 bytes"):
        read_header(file)
    monkeypatch.setattr(metadata, "MOST_ENTRIES", 0)
    with pytest.raises(InputError, match="it promises 1 values, more than the 0 that are read"):
        read_header(file)


def test_values_of_every_type_are_read_as_the_package_reads_them(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for name, x in dict(
        uint8=200, int8=-7, uint16=60000, int16=-9, uint32=2**31, int32=-5, uint64=2**60, int64=-(2**60)
    ).items():
        getattr(writer, f"add_{name}")(name, x)
    writer.add_float32("float32", 1e-6)
    writer.add_float64("float64", 1e-6)
    writer.add_bool("bool", True)
    writer.add_string("string", "größe\n")
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("texts", ["a", "", "ü"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    values = read_header(tmp_path / "model.gguf").values
    theirs = gguf.GGUFReader(tmp_path / "model.gguf").fields
    for key, x in values.items():
        expected = theirs[key].contents()
        assert (
            x == pytest.approx(expected, rel=1e-7)
            if key == "float32"
            else list(x) == expected
            if key in ("numbers", "texts")
            else x == expected
        )
    assert values["float32"] == 1e-6 and len(values) == 15


def test_tensors_lie_where_the_package_finds_them(small):
    ours, theirs = read_header(small), gguf.GGUFReader(small)
    assert {name: (t.type, t.shape, t.start, t.size) for name, t in ours.tensors.items()} == {
        t.name: (t.tensor_type.name, tuple(t.shape.tolist()[::-1]), t.data_offset, t.n_bytes) for t in theirs.tensors
    }


@pytest.mark.parametrize("kind", sorted(CODES | {"F32", "F16", "BF16"}))
def test_numbers_of_each_type_are_the_packages(kind, tmp_path, monkeypatch):
    """Random bytes, and rows in more than one piece; the package reads the same file."""
    monkeypatch.setattr(numbers, "PIECE", 700)
    number = GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    columns = max(256, block)
    stored = np.random.default_rng(0).integers(0, 256, (2, 9, columns // block * size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("filler", np.zeros(3, np.float32))
    writer.add_tensor("x", stored, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_header(tmp_path / "model.gguf").tensors["x"]
    with np.errstate(all="ignore"):
        theirs = gguf.GGUFReader(tmp_path / "model.gguf").tensors[1]
        expected = quants.dequantize(np.array(theirs.data), number)
    assert tensor.shape == expected.shape == (2, 9, columns)
    for ours, theirs in ((read_numbers(tensor), expected), (read_numbers(tensor, expert=1), expected[1])):
        np.testing.assert_array_equal(ours.astype(np.float32).view(np.uint32), theirs.view(np.uint32))
    for box in ((slice(2, 7), slice(0, columns)), (slice(0, 9), slice(40, columns - 24))):
        ours = read_numbers(tensor, expert=1, box=box).astype(np.float32)
        np.testing.assert_array_equal(ours.view(np.uint32), expected[1][box].view(np.uint32))


def test_a_type_that_is_not_read_is_one_line(tmp_path):
    file = gguf_files.write(families.build(families.row("llama-gqa"), num_hidden_layers=1), tmp_path / "model.gguf")
    content, name = file.read_bytes(), b"blk.0.attn_v.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8  # behind the number of axes, and two axes
    file.write_bytes(content[:at] + struct.pack("<I", GGMLQuantizationType.I32) + content[at + 4 :])
    with pytest.raises(
        InputError, match="model.layers.0.self_attn.v_proj.weight is stored in I32, which is not read: take anot"
    ):
        load_model(file)


SPLIT = ("big-00001-of-00003.gguf", "big-00002-of-00003.gguf", "big-00003-of-00003.gguf")


def split(model, folder: Path) -> None:
    """Writes a model in three files, as llama-gguf-split names and marks them."""
    whole = gguf_files.write(model, folder / "whole.gguf")
    reader = gguf.GGUFReader(whole)
    for i, name in enumerate(SPLIT):
        writer = gguf.GGUFWriter(folder / name, "llama")
        if i == 0:
            for key, field in reader.fields.items():
                if key.startswith("llama."):
                    writer.add_key_value(key, field.contents(), field.types[0])
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", len(SPLIT))
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[i :: len(SPLIT)]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    whole.unlink()


@pytest.fixture
def parts(tmp_path) -> Path:
    split(families.build(families.row("llama-gqa"), num_hidden_layers=1), tmp_path)
    return tmp_path


def test_a_split_set_is_one_model(parts):
    folders = {resolve(parts / name) for name in SPLIT} | {resolve(parts)}
    assert len(folders) == 1
    expected = families.build(families.row("llama-gqa"), num_hidden_layers=1).model.layers[0].mlp.up_proj.weight
    layer = load_model(parts).model.layers[0]
    np.testing.assert_array_equal(layer.mlp.up_proj.weight[...], expected.detach().numpy())


def test_endings_in_capital_letters_are_gguf(small, parts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("capitals")
    shutil.copyfile(small, folder / "M.GGUF")
    assert resolve(folder) == resolve(folder / "M.GGUF")
    capitals = [name.replace(".gguf", ".GGUF") for name in SPLIT]
    for name, new_name in zip(SPLIT, capitals, strict=True):
        os.rename(parts / name, parts / new_name)
    assert resolve(parts) == resolve(parts / capitals[1])
    assert "of" not in resolve(parts).name


def test_a_part_that_is_missing_is_named(parts):
    (parts / SPLIT[1]).unlink()
    with pytest.raises(InputError, match=rf"1 of its 3 parts are missing \({SPLIT[1]}\): fetch them"):
        resolve(parts / SPLIT[2])


def test_parts_under_wrong_names_are_refused(parts):
    os.rename(parts / SPLIT[1], parts / "x")
    os.rename(parts / SPLIT[2], parts / SPLIT[1])
    os.rename(parts / "x", parts / SPLIT[2])
    with pytest.raises(InputError, match="says that it is part 2 of 3, counted from 0, and its name that it is 1 of 3"):
        resolve(parts)
    shutil.copyfile(parts / SPLIT[0], parts / "alone.gguf")
    with pytest.raises(InputError, match="says that it is part 0 of 3, counted from 0, and its name that it is 0 of 1"):
        resolve(parts / "alone.gguf")
    shutil.copyfile(parts / SPLIT[0], parts / "x-00009-of-00003.gguf")
    with pytest.raises(InputError, match="expected a part's number up to the number of parts"):
        resolve(parts / "x-00009-of-00003.gguf")


def test_parts_of_other_tensors_are_refused(parts, monkeypatch):
    files, read = [parts / name for name in SPLIT], metadata.read_header
    headers = {file: read(file) for file in files}
    monkeypatch.setattr(gguf_parts, "read_header", headers.get)
    [name, *_] = headers[files[0]].tensors
    headers[files[2]] = headers[files[2]]._replace(tensors={name: headers[files[0]].tensors[name]})
    with pytest.raises(InputError, match=rf"{SPLIT[2]} holds tensors of another part again \('{name}'\)$"):
        gguf_parts.read_model(files[0])
    headers[files[2]] = headers[files[2]]._replace(tensors={})
    count = sum(len(header.tensors) for header in headers.values())
    promised = headers[files[0]].values["split.tensors.count"]
    with pytest.raises(InputError, match=f"{SPLIT[0]}: its parts hold {count} tensors, expected {promised}: fetch them again"):
        gguf_parts.read_model(files[0])


def test_what_is_no_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")  # opening it would wait for a writer
    for path in (tmp_path / "model.gguf", tmp_path):
        with pytest.raises(InputError, match=f"^{path} is no file: expected a GGUF file$"):
            read_header(path)


def test_a_folder_with_one_gguf_model_is_that_model(small, tmp_path):
    shutil.copyfile(small, tmp_path / "small.gguf")
    (tmp_path / "mmproj-small.gguf").write_bytes(b"GGUF")
    (tmp_path / "README.md").write_text("a model")
    assert resolve(tmp_path) == resolve(tmp_path / "small.gguf")
    shutil.copyfile(small, tmp_path / "other.gguf")
    with pytest.raises(InputError, match=r"holds 2 GGUF models: give one of the files \(other.gguf; small.gguf\)"):
        resolve(tmp_path)


def test_files_beside_a_gguf_model_are_no_models(small, tmp_path):
    shutil.copyfile(small, tmp_path / "small.gguf")
    for name in ("._small.gguf", "small-mmproj-f16.gguf", "MMPROJ.gguf", "small-imatrix.gguf"):
        (tmp_path / name).write_bytes(b"no GGUF")
    (tmp_path / "other.gguf").mkdir()
    assert resolve(tmp_path) == resolve(tmp_path / "small.gguf")


def test_a_lone_model_may_be_named_after_its_imatrix(small, tmp_path):
    shutil.copyfile(small, tmp_path / "small-imatrix-Q4_0.gguf")
    assert resolve(tmp_path) == resolve(tmp_path / "small-imatrix-Q4_0.gguf")


def test_a_folder_with_an_image_part_alone_says_so(tmp_path):
    (tmp_path / "mmproj-small.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError) as told:
        resolve(tmp_path)
    assert str(told.value) == (
        f"{tmp_path} holds a model's image part alone (mmproj-small.gguf): add the language model's GGUF file"
    )


def test_a_gguf_model_beside_a_lora_is_read(small, tmp_path, caplog):
    shutil.copyfile(small, tmp_path / "small.gguf")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert resolve(tmp_path) == resolve(tmp_path / "small.gguf")
    assert f"{tmp_path}: the LoRA adapter (adapter_config.json) is not used" in caplog.messages


def test_safetensors_in_a_folder_come_before_gguf(small, tmp_path):
    families.save(families.build(families.row("llama-gqa")), tmp_path)
    shutil.copyfile(small, tmp_path / "small.gguf")
    assert resolve(tmp_path) == tmp_path


def test_a_file_without_the_ending_is_known_by_its_letters(small, tmp_path):
    shutil.copyfile(small, tmp_path / "sha256-1234")
    assert (resolve(tmp_path / "sha256-1234") / POINTER).is_file()
    (tmp_path / "model.bin").write_bytes(b"weights")
    with pytest.raises(InputError, match="model.bin is a file: expected a checkpoint folder, a GGUF file or a hub id"):
        resolve(tmp_path / "model.bin")
    with pytest.raises(InputError, match="is a file, and only a hub id has revisions: leave revision v1 out"):
        resolve(tmp_path / "sha256-1234", revision="v1")


def test_the_folder_is_private_and_made_once(small, monkeypatch):
    folder = resolve(small)
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    assert folder.name.startswith("small-") and not list(folder.glob("*.gguf"))
    monkeypatch.setattr(gguf_folder, "_make", None)
    assert resolve(small) == resolve(folder) == folder


def test_a_folder_that_another_process_makes_is_awaited(small, tmp_path, monkeypatch):
    """The other holds the lock while this one begins, and makes the folder."""
    shutil.copyfile(small, tmp_path / "small.gguf")
    folder, claim = resolve(tmp_path / "small.gguf"), atomic_folder.claim
    os.rename(folder, tmp_path / "made")
    (lock := folder.parent / f".{folder.name}.lock").touch()

    def claimed(path, *, mark):
        os.rename(tmp_path / "made", folder)
        raise InputError(f"{path} is in use")

    monkeypatch.setattr(gguf_folder, "claim", claimed)
    assert resolve(tmp_path / "small.gguf") == folder
    lock.unlink()
    shutil.rmtree(folder)
    monkeypatch.setattr(gguf_folder, "claim", lambda path, *, mark: claim(Path("/proc/x"), mark=mark))
    with pytest.raises(InputError, match="/proc/x cannot be written"):
        resolve(tmp_path / "small.gguf")


def test_another_file_of_the_same_header_has_another_folder(small, tmp_path):
    shutil.copyfile(small, tmp_path / "small.gguf")
    assert resolve(tmp_path / "small.gguf") != resolve(small)


def test_a_gguf_file_that_is_gone_is_told(small, tmp_path):
    shutil.copyfile(small, tmp_path / "small.gguf")
    folder = resolve(tmp_path / "small.gguf")
    (tmp_path / "small.gguf").unlink()
    with pytest.raises(InputError, match="small.gguf' is missing: give the file where it is now"):
        load_model(folder)


def test_a_gguf_file_that_goes_while_it_is_read_is_told(small, tmp_path):
    shutil.copyfile(small, tmp_path / "small.gguf")
    tensor = read_header(tmp_path / "small.gguf").tensors["output.weight"]
    (tmp_path / "small.gguf").write_bytes(small.read_bytes()[: tensor.start + 1])
    with pytest.raises(InputError, match="small.gguf has become shorter while it was read: fetch it again"):
        read_numbers(tensor)
    (tmp_path / "small.gguf").unlink()
    with pytest.raises(InputError, match=r"small.gguf cannot be read: \[Errno 2\] No such file or directory"):
        read_numbers(tensor)


def test_a_file_on_the_hub_is_fetched_with_its_parts(parts, monkeypatch):
    asked = []

    def snapshot_download(hub_id, *, revision, allow_patterns):
        asked.append((hub_id, revision, allow_patterns))
        return parts

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve(f"org/big-GGUF:{SPLIT[1]}", revision="v1") == resolve(parts)
    assert asked == [("org/big-GGUF", "v1", list(SPLIT))]
    # The tests run with HF_HUB_OFFLINE=1.
    beginning = "^org/big-GGUF: Q4/small.gguf is not in the hub's cache, and the hub cannot be asked for it: Cannot reach "
    with pytest.raises(InputError, match=beginning):
        resolve("org/big-GGUF:Q4/small.gguf")
    monkeypatch.setattr(huggingface_hub, "file_exists", lambda hub_id, name, *, revision: False)
    with pytest.raises(InputError, match="org/big-GGUF has no file Q4/small.gguf on the hub"):
        resolve("org/big-GGUF:Q4/small.gguf")
    assert asked[1][2] == ["Q4/small.gguf"]
    with pytest.raises(InputError, match="name one of them behind it, as org/Some-8B-GGUF:FILE.gguf"):
        resolve("org/Some-8B-GGUF")
    assert len(asked) == 3


def test_an_unsound_file_ends_the_command_with_one_line(tmp_path, capsys):
    (tmp_path / "model.gguf").write_bytes(UNSOUND["lying tensors"][0])
    assert generate.main(["--model", str(tmp_path / "model.gguf"), "--prompt", "x"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("icejax.generate: error: ") and err.count("\n") == 1


@settings(max_examples=150, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_any_change_of_a_file_is_read_or_told(small, tmp_path_factory, data):
    """Cut ends, flipped bits and changed numbers in the header: InputError, or a header and its numbers."""
    content = bytearray(small.read_bytes())
    header = read_header(small).size
    content = content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))]
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, header))
        if at + 8 <= len(content):
            new = data.draw(st.sampled_from([b"\xff" * 8, bytes(8), struct.pack("<Q", HUGE), struct.pack("<Q", 2**31)]))
            width = data.draw(st.sampled_from([1, 2, 4, 8]))
            content[at : at + width] = new[:width]
    file = tmp_path_factory.mktemp("fuzz") / "small.gguf"
    file.write_bytes(content)
    try:
        for tensor in read_header(file).tensors.values():
            if tensor.type in CODES | {"F32"}:
                assert read_numbers(tensor).shape == tensor.shape
        resolve(file)
    except InputError as error:
        assert "\n" not in str(error)
