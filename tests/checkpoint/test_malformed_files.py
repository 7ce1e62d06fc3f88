"""Fuzzes config, weight, session and prompt files: any content is read, or refused with a one-line InputError."""

import copy
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from icejax.checkpoint import load
from icejax.checkpoint.quantized import formats
from icejax.checkpoint.quantized.layouts import QuantizedMatrix
from icejax.checkpoint.readers import huggingface
from icejax.checkpoint.tensors import open_tensors
from icejax.checks.errors import InputError
from icejax.commands.options import parser
from icejax.commands.requests import read_prompts
from icejax.ops.rope import inverse_frequencies
from icejax.session import storage
from tests.helpers.quantised import FORMATS
from tests.models.test_published_configs import PUBLISHED

CONFIG = dict(
    model_type="llama", vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, eos_token_id=[1, 2],
    rms_norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=64, layer_types=["full_attention"],
)  # fmt: skip
SHAPES = {key: leaf.shape for key, leaf in load.abstract(load.family(CONFIG).read_config(CONFIG), "float32")[1].items()}


def weights() -> tuple[dict, bytes]:
    """Returns the header of a valid safetensors file, and its data."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for key, shape in SHAPES.items():
        size = 4 * int(np.prod(shape))
        header[key] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    return header, bytes(offset)


HEADER, DATA = weights()


def safetensors(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + DATA


def sound(folder: Path) -> None:
    """Writes a valid small checkpoint, and the arrays of a session."""
    (folder / "arrays").write_bytes(TOKENS)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(safetensors(json.dumps(HEADER).encode()))


def read_config(folder: Path) -> None:
    config = load.read_config(folder)
    formats.sources(huggingface.read_json(folder / "config.json"), SHAPES)
    assert 1 <= config.context_length <= 2**24 and config.head_dim % 2 == 0
    if config.rope_scaling is None or config.rope_scaling.rope_type != "dynamic":
        assert np.isfinite(inverse_frequencies(config.layers[0].rope)).all()


def read_weights(folder: Path) -> None:
    tensors = open_tensors(folder, load.read_config(folder), SHAPES)
    for key in tensors.sources:
        tensor = tensors.read(key)
        assert (tensor.weights() if isinstance(tensor, QuantizedMatrix) else tensor).dtype.kind in "fV"


def read_jsonl(folder: Path) -> None:
    prompts = read_prompts(parser("icejax.generate").parse_args(["--prompt-file", str(folder / "prompts.jsonl")]))
    assert all(isinstance(request.prompt, str) or request.messages for request in prompts)


def read_session(folder: Path) -> None:
    session = storage.read_session(folder)
    assert 0 < session.about.tokens <= session.about.context_length <= 2**24
    assert hash(session.policy) is not None
    session.verify()


def with_checksum(text: bytes) -> bytes:
    """Returns a session.json with its checksum recomputed; a wrong checksum would hide all other faults."""
    try:
        fields = json.loads(text)
        return json.dumps(fields | {"checksum": storage._checksum(fields)}).encode()
    except (ValueError, TypeError, RecursionError):
        return text


TOKENS = bytes(20)
SESSION = dict(
    version=storage.VERSION, context_length=100, first=3, tokens=5, pages=0, started=1.5, messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
    identity={"config.model_type": "llama", "dtype": "float32", "weights": 1, "cache.name": "clustered", "cache.budget": 64},
    arrays={"token_ids": dict(dtype="int32", shape=[5], crc32=zlib.crc32(TOKENS))},
)  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "a"}], "seed": 3, "max_new_tokens": 5, "stop": "x"}
QUANTISED = [CONFIG | {"quantization_config": FORMATS[name].config} for name in ("fp8-blocks", "awq", "gptq", "packed-4")]
# File -> its reader, valid contents that are mutated, and a function from the mutated JSON text to the file's bytes.
ENTRIES = {
    "config.json": (read_config, [CONFIG, *QUANTISED, *(raw for raw, _ in PUBLISHED.values())], bytes),
    "generation_config.json": (read_config, [{"eos_token_id": 2}, {"eos_token_id": [1, 2], "temperature": 0.6}], bytes),
    huggingface.INDEX: (
        read_weights,
        [{"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(SHAPES, "model.safetensors")}],
        bytes,
    ),
    "model.safetensors": (read_weights, [HEADER], safetensors),
    "session.json": (read_session, [SESSION], with_checksum),
    "prompts.jsonl": (
        read_jsonl,
        [{"prompt": "a"}, {"prompt": "b", "id": 3, "temperature": 0.5, "stop": ["x"]}, CHAT],
        lambda text: b'{"prompt": "x"}\n' + text,
    ),
}
NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 2**31, 2**63, 10**400, 0.0, -0.5, 1e-320, 1e308, float("nan"), float("inf")])
WORDS = st.sampled_from(
    ["", "..", "/", "a\nb", "\x1b[2J", "\ud800", "linear", "dynamic", "yarn", "llama3", "qwen3", "F16", "I32"]
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


SELDOM = st.sampled_from([False] * 19 + [True])


@st.composite
def contents(draw, name: str) -> bytes:
    """Draws a file's bytes: JSON with fields dropped and values replaced, and sometimes bytes changed, cut or inserted."""
    _, seeds, wrap = ENTRIES[name]
    content = copy.deepcopy(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 3))):
        node = content
        while isinstance(node, (dict, list)) and node:
            key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
            if isinstance(node[key], (dict, list)) and node[key] and draw(st.booleans()):
                node = node[key]
                continue
            if draw(SELDOM):
                del node[key]
            else:
                node[key] = draw(JSON)
            break
    text = json.dumps(draw(JSON) if draw(SELDOM) else content).encode()
    for _ in range(draw(st.sampled_from([0] * 8 + [1, 4]))):
        position, replacement = draw(st.integers(0, len(text))), draw(st.binary(max_size=3))
        text = text[:position] + replacement + text[position + draw(st.integers(0, 3)) :]
    content_bytes = wrap(text)
    return content_bytes[: draw(st.integers(0, len(content_bytes)))] if draw(SELDOM) else content_bytes


def check(name: str, folder: Path, content: bytes) -> None:
    sound(folder)
    file = folder / name
    file.unlink(missing_ok=True)
    file.write_bytes(content)
    before = sorted(folder.iterdir())
    try:
        ENTRIES[name][0](folder)
    except InputError as error:
        message = str(error)
        assert message and message.isprintable() and len(message) < 5000
    assert sorted(folder.iterdir()) == before


def limited_examples(examples: int):
    suppressed = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=suppressed)


@pytest.mark.parametrize("name", ENTRIES)
@limited_examples(50)
@given(data=st.data())
def test_any_content_is_read_or_refused_in_one_line(tmp_path, name, data):
    check(name, tmp_path, data.draw(contents(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
@limited_examples(1500)
@given(data=st.data())
def test_more_contents_are_read_or_refused_in_one_line(tmp_path, name, data):
    check(name, tmp_path, data.draw(contents(name)))


@pytest.mark.parametrize("name", ENTRIES)
def test_what_the_changes_begin_with_is_sound(tmp_path, name):
    """If a seed were refused, every mutation of it would be, for the same reason."""
    read, seeds, wrap = ENTRIES[name]
    for seed in seeds:
        sound(tmp_path)
        (tmp_path / name).write_bytes(wrap(json.dumps(seed).encode()))
        read(tmp_path)
