"""Files that anyone may have written: whatever stands in them, it is read, or refused in one line; nothing else happens."""

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
    """The header of a sound weight file, and its data."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for key, shape in SHAPES.items():
        size = 4 * int(np.prod(shape))
        header[key] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return header, bytes(at)


HEADER, DATA = weights()


def safetensors(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + DATA


def sound(folder: Path) -> None:
    """Writes a whole small checkpoint, and the arrays of a session."""
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
    found = open_tensors(folder, load.read_config(folder), SHAPES)
    for key in found.sources:
        tensor = found.read(key)
        assert (tensor.weights() if isinstance(tensor, QuantizedMatrix) else tensor).dtype.kind in "fV"


def read_jsonl(folder: Path) -> None:
    prompts = read_prompts(parser("icejax.generate").parse_args(["--prompt-file", str(folder / "prompts.jsonl")]))
    assert all(isinstance(asked.prompt, str) or asked.messages for asked in prompts)


def read_session(folder: Path) -> None:
    found = storage.read_session(folder)
    assert 0 < found.about.tokens <= found.about.context_length <= 2**24
    assert hash(found.policy) is not None
    found.verify()


def with_checksum(text: bytes) -> bytes:
    """Or every change would be refused for the same reason."""
    try:
        fields = json.loads(text)
        return json.dumps(fields | {"checksum": storage._checksum(fields)}).encode()
    except (ValueError, TypeError, RecursionError):
        return text


TOKENS = bytes(20)
SESSION = dict(
    version=storage.VERSION, context_length=100, first=3, tokens=5, pages=0, started=1.5, messages=[{"role": "user", "content": "x"}],
    identity={"config.model_type": "llama", "dtype": "float32", "weights": 1, "cache.name": "clustered", "cache.budget": 64},
    arrays={"token_ids": dict(dtype="int32", shape=[5], crc32=zlib.crc32(TOKENS))},
)  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "a"}], "seed": 3, "max_new_tokens": 5, "stop": "x"}
QUANTISED = [CONFIG | {"quantization_config": FORMATS[name].config} for name in ("fp8-blocks", "awq", "gptq", "packed-4")]
# File -> what reads it, sound contents to begin with, and what makes bytes of a changed content's JSON.
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
    """Bytes for a file: JSON with fields dropped and values replaced, then, at times, bytes changed, cut or put in."""
    _, seeds, wrap = ENTRIES[name]
    content = copy.deepcopy(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 3))):
        inside = content
        while isinstance(inside, (dict, list)) and inside:
            key = draw(st.sampled_from(sorted(inside) if isinstance(inside, dict) else range(len(inside))))
            if isinstance(inside[key], (dict, list)) and inside[key] and draw(st.booleans()):
                inside = inside[key]
                continue
            if draw(SELDOM):
                del inside[key]
            else:
                inside[key] = draw(JSON)
            break
    text = json.dumps(draw(JSON) if draw(SELDOM) else content).encode()
    for _ in range(draw(st.sampled_from([0] * 8 + [1, 4]))):
        at, by = draw(st.integers(0, len(text))), draw(st.binary(max_size=3))
        text = text[:at] + by + text[at + draw(st.integers(0, 3)) :]
    found = wrap(text)
    return found[: draw(st.integers(0, len(found)))] if draw(SELDOM) else found


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


def few(examples: int):
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=quiet)


@pytest.mark.parametrize("name", ENTRIES)
@few(150)
@given(data=st.data())
def test_any_content_is_read_or_refused_in_one_line(tmp_path, name, data):
    check(name, tmp_path, data.draw(contents(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
@few(1500)
@given(data=st.data())
def test_more_contents_are_read_or_refused_in_one_line(tmp_path, name, data):
    check(name, tmp_path, data.draw(contents(name)))


@pytest.mark.parametrize("name", ENTRIES)
def test_what_the_changes_begin_with_is_sound(tmp_path, name):
    """Or every example would be refused for the same reason."""
    read, seeds, wrap = ENTRIES[name]
    for seed in seeds:
        sound(tmp_path)
        (tmp_path / name).write_bytes(wrap(json.dumps(seed).encode()))
        read(tmp_path)
