"""Validation of safetensors files and their index: dtypes F32, F16 and BF16, a whole header, plain file names."""

import json
import os
import re
import struct

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from icejax.checkpoint import load_model
from icejax.checkpoint.readers import huggingface, orbax
from icejax.checks.errors import InputError
from tests.helpers import families

KEY = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return families.save(families.build(families.row("llama-gqa"), num_hidden_layers=1), tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(source, tmp_path):
    """A fresh folder of links to `source`, which a test may change."""
    for file in source.iterdir():
        os.symlink(file, tmp_path / file.name)
    return tmp_path


def replace(folder, content: bytes) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    "dtype, name",
    [(torch.int32, "I32"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64"), (torch.bool, "BOOL")],
    ids=str,
)
def test_other_dtypes_are_refused_before_a_tensor_is_read(folder, monkeypatch, dtype, name):
    tensors = {key: torch.tensor(x) for key, x in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    save_file(tensors | {KEY: tensors[KEY].to(dtype)}, folder / "model.safetensors")
    monkeypatch.setattr(huggingface, "read_tensor", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(InputError, match=f"{KEY}: dtype {name} is not supported: expected F32, F16, BF16"):
        load_model(folder)


def test_an_icejax_folder_of_other_dtypes_is_refused_too(folder):
    stored = load_file(folder / "model.safetensors")
    stored[KEY] = stored[KEY].astype(np.int32)
    about, pieces = {key: (x.shape, "F32") for key, x in stored.items()}, [(key, 0, x) for key, x in stored.items()]
    orbax.save(folder / "orbax", about, pieces, most_bytes=1000)
    with pytest.raises(InputError, match=f"{KEY}: dtype I32 is not supported: expected F32, F16, BF16"):
        load_model(folder)


def header(content: object, size: int | None = None) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text


HEADERS = {
    "empty": b"",
    "short": b"\1\0\0",
    "huge size": header({}, size=2**63),
    "size past the end": header({}, size=10**7),
    "no json": header(b"\xff\xfe{}"),
    "list": header([]),
    "nested": header(b"[" * 100_000),
    "other fields": header({"a": {"dtype": "F32"}}),
    "offsets past the end": header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
    "shape that overflows": header({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 0]}}),
    "negative": header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}),
    "unknown dtype": header({"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}) + b"1234",
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_broken_header_is_one_line(folder, case):
    replace(folder, HEADERS[case])
    with pytest.raises(InputError, match="is not a whole safetensors file") as error:
        load_model(folder)
    assert "\n" not in str(error.value)


def test_what_is_no_file_is_not_waited_for(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(InputError, match="is not a whole safetensors file .it is no file"):
        load_model(folder)


def test_a_key_that_breaks_the_line_does_not(folder):
    replace(folder, header({"a\nb\x1b[2J": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}))
    with pytest.raises(InputError, match=re.escape(r"a\nb\x1b[2J is not a parameter of this model")):
        load_model(folder)


@pytest.mark.parametrize(
    "index, message",
    [
        ([], "expected a JSON object, found a list"),
        ({}, "'weight_map' must be an object, got None"),
        ({"weight_map": ["model.safetensors"]}, "'weight_map' must be an object, got ['model.safetensors']"),
        ({"weight_map": {KEY: 1}}, f"expected the name of a file beside it for '{KEY}', got 1"),
        ({"weight_map": {KEY: ["a"]}}, f"expected the name of a file beside it for '{KEY}', got ['a']"),
        ({"weight_map": {KEY: "../model.safetensors"}}, "got '../model.safetensors'"),
        ({"weight_map": {KEY: "/etc/passwd"}}, "got '/etc/passwd'"),
        ({"weight_map": {KEY: ".."}}, "got '..'"),
        ({"weight_map": {KEY: "a\0b"}}, r"got 'a\x00b'"),
        ({"weight_map": {KEY: "other.safetensors"}}, "other.safetensors is named in model.safetensors.index.json and missing"),
    ],
)
def test_an_index_names_files_beside_it(folder, index, message):
    (folder / huggingface.INDEX).write_text(json.dumps(index))
    with pytest.raises(InputError, match=re.escape(message)) as error:
        load_model(folder)
    assert "\n" not in str(error.value)
