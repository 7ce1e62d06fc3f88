"""The folder that is made of a GGUF file: which file it stands for, when it is made again, and who may have made it."""

import json
import os
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from icejax.checkpoint import load_model
from icejax.checkpoint.folder import POINTER, resolve
from icejax.checkpoint.gguf import folder as gguf_folder
from icejax.checks.errors import InputError
from icejax.files import atomic_folder
from tests.helpers import families, gguf_files
from tests.helpers.quantised import dense


@pytest.fixture(autouse=True)
def no_tokenizers(monkeypatch):
    gguf_files.without_tokenizers(monkeypatch)


def tiny():
    return families.build(families.row("llama-gqa"), num_hidden_layers=1, vocab_size=16)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A small valid file."""
    return gguf_files.write(tiny(), tmp_path_factory.mktemp("small") / "small.gguf", "Q4_0")


@pytest.fixture
def file(small, tmp_path) -> Path:
    """The small file in a folder and with a cache directory of the test."""
    return Path(shutil.copyfile(small, tmp_path / "small.gguf"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The folder of the test's cache directory in which folders are made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "icejax" / "gguf"


def test_a_replaced_file_of_equal_time_is_read_anew(file, tmp_path):
    """The new file has its tensors at other places, and the old one's time."""
    old = file.stat()
    old_folder = resolve(file)
    load_model(file)
    model = tiny()
    gguf_files.write(model, tmp_path / "new", "Q8_0")
    os.utime(tmp_path / "new", ns=(old.st_atime_ns, old.st_mtime_ns))
    os.rename(tmp_path / "new", file)
    weights = dense(load_model(file).model.layers[0].mlp.up_proj.weight.get_value())
    np.testing.assert_array_equal(weights, model.model.layers[0].mlp.up_proj.weight.detach().numpy())
    with pytest.raises(InputError, match="was made of another file than .*small.gguf is now, or by another version of icejax"):
        load_model(old_folder)


def test_a_pointer_outside_the_cache_means_nothing(file, tmp_path):
    """A folder that was copied, or fetched, is read as its safetensors."""
    model = families.build(families.row("llama-gqa"))
    families.save(model, tmp_path / "model")
    (tmp_path / "model" / POINTER).write_text(json.dumps({"file": str(file)}))
    weights = load_model(tmp_path / "model").model.layers[1].mlp.up_proj.weight[...]
    np.testing.assert_array_equal(weights, model.model.layers[1].mlp.up_proj.weight.detach().numpy())
    os.symlink(resolve(file), tmp_path / "link")
    assert len(load_model(tmp_path / "link").model.layers) == 1


@pytest.mark.parametrize("name", ["small.gguf", "/" + 5000 * "a", "/a\0b", "/" + 300 * "a/", "", 7, None, "/dev/zero", "/tmp"])
def test_a_pointer_that_is_no_file_is_told(file, monkeypatch, name):
    monkeypatch.chdir(file.parent)
    folder = resolve(file)
    (folder / POINTER).write_text(json.dumps({"file": name}))
    with pytest.raises(InputError, match="the GGUF file .* is missing: give the file where it is now"):
        load_model(folder)


def test_a_field_that_was_removed_is_told(file):
    folder = resolve(file)
    config = json.loads((folder / "config.json").read_text())
    del config["num_key_value_heads"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="config.json has no 'num_key_value_heads': remove its folder and give the GGUF file"):
        load_model(folder)


def test_changed_numbers_of_rope_change_the_config(tmp_path):
    """Only the bytes of `rope_freqs.weight` differ, not the header."""
    model = families.build(families.row("llama-llama3"), num_hidden_layers=1)
    file = gguf_files.write(model, tmp_path / "small.gguf")
    tensor = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "rope_freqs.weight")
    start, divisors = int(tensor.data_offset), np.array(tensor.data)
    old = resolve(file)
    content = bytearray(file.read_bytes())
    content[start : start + divisors.nbytes] = np.full_like(divisors, 7.0).tobytes()
    file.write_bytes(content)
    old, new = (json.loads((folder / "config.json").read_text())["rope_parameters"] for folder in (old, resolve(file)))
    assert old["long_factor"] == pytest.approx(divisors) and new["long_factor"] == [7.0] * len(divisors)


def test_a_config_that_is_not_read_leaves_no_folder(tmp_path, cache):
    model = tiny()
    file = gguf_files.write(model, tmp_path / "small.gguf", attention__head_count_kv=3)
    with pytest.raises(
        InputError, match="small.gguf: its metadata make a config that is not read: .* do not divide among 3 KV heads"
    ):
        resolve(file)
    assert not cache.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", POINTER])
def test_a_folder_that_lost_a_file_is_made_again(file, name):
    folder = resolve(file)
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(contents) == 3
    (folder / name).unlink()
    assert resolve(file) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"made": 1}', '{"made": []}', '{"made": [1], "warnings": []}', '{"made": ["\\u0000"]}']
)
def test_a_damaged_pointer_is_made_again(file, text):
    folder = resolve(file)
    pointer = (folder / POINTER).read_text()
    (folder / POINTER).write_text(text)
    assert (resolve(file) / POINTER).read_text() == pointer


def test_a_cache_that_cannot_be_written_is_named(file, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("no directory")
    with pytest.raises(InputError, match=r"cache/icejax/gguf cannot be made \(Not a directory\): XDG_CACHE_HOME must name a"):
        resolve(file)


def test_a_folder_that_cannot_be_written_is_named(file, cache, monkeypatch):
    monkeypatch.setattr(gguf_folder, "claim", lambda path, *, mark: atomic_folder.claim(Path("/proc/x"), mark=mark))
    with pytest.raises(InputError, match=r"/proc/x cannot be written .*: choose another place; XDG_CACHE_HOME must name a"):
        resolve(file)


def test_a_folder_made_before_the_claim_is_used(file, tmp_path, monkeypatch):
    """Another process makes it after this one looked, and before this one has the lock."""
    folder = resolve(file)
    os.rename(folder, made := tmp_path / "made")
    state = made.stat()

    def claim(path, *, mark):
        os.rename(made, folder)
        return atomic_folder.claim(path, mark=mark)

    monkeypatch.setattr(gguf_folder, "claim", claim)
    assert resolve(file) == folder and os.path.samestat(folder.stat(), state)


def test_a_folder_made_while_this_one_looks_is_used(file, tmp_path, monkeypatch):
    """Another process holds the lock, and finishes between two looks at the disk."""
    folder, exists, looks = resolve(file), Path.exists, []
    os.rename(folder, tmp_path / "made")

    def looked(path):
        if path.suffix != ".lock":
            return exists(path)
        looks.append(path)
        if len(looks) == 2:
            os.rename(tmp_path / "made", folder)
        return len(looks) == 1

    def claim(path, *, mark):
        raise InputError(f"{path} is in use")

    monkeypatch.setattr(Path, "exists", looked)
    monkeypatch.setattr(gguf_folder, "claim", claim)
    assert resolve(file) == folder and len(looks) == 2


@pytest.mark.parametrize("letter", ["\u8a9e", "\u00e9", "a"])
def test_long_names_of_any_letters_make_folders(file, letter):
    name = letter * ((255 - len(".gguf")) // len(letter.encode())) + ".gguf"
    folder = resolve(file.rename(file.parent / name))
    assert folder.name.startswith(letter * (80 // len(letter.encode())) + "-")


def test_a_folder_of_another_user_is_not_used(file, cache, monkeypatch):
    folder, user = resolve(file), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    refused = f"{cache} belongs to another user, whose files would stand for the model's: let XDG_CACHE_HOME name a directory"
    for path in (file, folder):
        with pytest.raises(InputError, match=refused):
            load_model(path)


def test_a_cache_that_everybody_may_write_is_not_used(file, cache):
    folder = resolve(file)
    cache.chmod(0o777)
    for path in (file, folder):
        with pytest.raises(InputError, match="icejax/gguf may be written by everybody, whose files would stand for"):
            load_model(path)
    cache.chmod(0o700)
    folder.chmod(0o777)
    with pytest.raises(InputError, match=f"{folder} may be written by everybody"):
        load_model(file)


def test_warnings_are_logged_at_each_load(tmp_path, caplog):
    file = gguf_files.write(tiny(), tmp_path / "small.gguf", mystery=7)
    warnings = []
    for _ in range(3):
        caplog.clear()
        resolve(file)
        warnings.append([record.getMessage() for record in caplog.records if record.name.startswith("icejax.checkpoint.gguf")])
    assert warnings == 3 * [["small.gguf: 'llama.mystery' not read"]]
