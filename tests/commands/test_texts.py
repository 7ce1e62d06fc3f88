"""What is read of files and streams: as much as a context can take, and never more, whatever their size."""

import io
import os
import shutil
import sys
import threading
import tracemalloc

import pytest

import icejax
from icejax.api.generate import ASSETS
from icejax.cache.registry import Full
from icejax.commands import generate, loading, texts
from icejax.commands.options import parser
from icejax.commands.terminal import lines
from tests.helpers import families, gguf_files
from tests.helpers.commands import run

LENGTH = 100
MOST = 16 * LENGTH + 2**20
TAKES = (
    f", and a context of {LENGTH} tokens takes at most {MOST}: shorten it, or raise --context-length if the model can take it"
)
CONTEXT = ["--context-length", str(LENGTH), "--max-new-tokens", "1", "--compile-cache", "none"]


@pytest.fixture(autouse=True)
def no_model_is_loaded(monkeypatch):
    monkeypatch.setattr(generate, "load", lambda *_: pytest.fail("the model was loaded"))


def refusal(capsys, *arguments: str) -> str:
    """Returns the one-line error of a command that refuses its prompts, without ever holding much of them."""
    tracemalloc.start()
    status, out, err = run(capsys, *arguments, *CONTEXT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (status, out, err.count("\n")) == (2, "", 1) and peak < 10 * MOST
    return err.removeprefix("icejax.generate: error: ").strip()


@pytest.mark.parametrize("size", [MOST + 1, 2**40])
def test_a_file_is_refused_by_its_size(capsys, tmp_path, monkeypatch, size):
    file = tmp_path / "book.txt"
    file.touch()
    os.truncate(file, size)  # sparse
    monkeypatch.setattr(texts, "_bounded", lambda *_: pytest.fail("the file was read"))
    assert refusal(capsys, "--prompt-file", str(file)) == f"{file} has {size} bytes{TAKES}"


def test_a_stream_is_refused_once_it_passes(capsys, tmp_path, monkeypatch):
    assert refusal(capsys, "--prompt-file", "/dev/zero") == f"/dev/zero has more than {MOST} bytes{TAKES}"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(open("/dev/zero", "rb")))
    assert refusal(capsys, "--prompt", "-") == f"stdin has more than {MOST} bytes{TAKES}"


def test_a_line_of_a_file_is_refused_once_it_passes(capsys, tmp_path):
    (tmp_path / "zeros.jsonl").symlink_to("/dev/zero")
    zeros = f"{tmp_path}/zeros.jsonl"
    assert refusal(capsys, "--prompt-file", zeros) == f"{zeros}, line 1 has more than {MOST} bytes{TAKES}"
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"prompt": "x"}\n\n' + b" " * (MOST + 1) + b"\n")
    assert refusal(capsys, "--prompt-file", str(file)) == f"{file}, line 3 has more than {MOST} bytes{TAKES}"


@pytest.mark.parametrize("size", [2**28 + 1, 2**40])
def test_a_file_of_lines_is_refused_by_its_size(capsys, tmp_path, monkeypatch, size):
    file = tmp_path / "many.jsonl"
    file.touch()
    os.truncate(file, size)  # sparse
    monkeypatch.setattr(texts, "_lines", lambda *_: pytest.fail("the file was read"))
    splits = f"and a .jsonl file may have {2**28}: split it into several files"
    assert refusal(capsys, "--prompt-file", str(file)) == f"{file} has {size} bytes, {splits}"


@pytest.mark.parametrize(
    "line, most, unit", [("", 500, "lines"), ('{"prompt": "x"}', 500, "lines"), ("x" * 2**20, 2 * MOST, "bytes")]
)
def test_a_stream_of_lines_is_refused_once_it_passes(tmp_path, monkeypatch, line, most, unit):
    monkeypatch.setattr(texts, "JSONL_BYTES", 2 * MOST)
    monkeypatch.setattr(texts, "JSONL_LINES", 500)
    path, stream = tmp_path / "endless.jsonl", io.BytesIO(f"{line}\n".encode() * 510)
    with pytest.raises(icejax.InputError) as error:
        list(texts._lines(path, stream, LENGTH))
    counts = f"has more than {most} {unit}, and a .jsonl file may have {most}"
    assert str(error.value) == f"{path} {counts}: split it into several files"
    assert stream.tell() <= 501 * (len(line) + 1) and stream.tell() <= 2 * MOST + len(line) + 1


def test_what_just_fits_is_read(tmp_path, monkeypatch):
    content = "x" * MOST
    (tmp_path / "p.txt").write_text(content)
    assert texts.read_text(tmp_path / "p.txt", context_length=LENGTH) == content
    (tmp_path / "p.jsonl").write_text(f"\ufeff{content[3:]}\n \r\n{content}\n{content}")
    places = [f"{tmp_path}/p.jsonl, line {number}" for number in (1, 3, 4)]
    assert list(texts.read_lines(tmp_path / "p.jsonl", context_length=LENGTH)) == list(
        zip(places, (content[3:], content, content), strict=True)
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    assert texts.read_stdin(context_length=LENGTH) == content
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{content}\n\n{content}"))
    assert list(lines.piped(lambda: LENGTH)) == [content, "", content]


def test_a_pipe_is_read_to_its_end(tmp_path):
    """As shells make them of `<(command)`; they have no size."""
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("from a pipe",))
    writer.start()
    assert texts.read_text(tmp_path / "pipe", context_length=LENGTH) == "from a pipe"
    writer.join()


def test_the_byte_that_is_no_text_is_counted_from_the_start(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "x"}\n{"prompt": "caf\xe9"}')
    with pytest.raises(icejax.InputError, match=r"p\.jsonl is not UTF-8 text \(byte 31\): convert it first$"):
        list(texts.read_lines(tmp_path / "p.jsonl", context_length=LENGTH))


def test_an_endless_line_ends_a_piped_chat(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"a\n{'x' * (MOST + 1)}"))
    piped = lines.piped(lambda: LENGTH)
    assert next(piped) == "a"
    with pytest.raises(icejax.InputError) as error:
        next(piped)
    assert str(error.value) == f"a line of stdin has more than {MOST} characters{TAKES}"


def test_the_context_is_the_options_the_sessions_or_the_models(tmp_path, bundled, monkeypatch):
    def length(*arguments: str) -> int:
        return loading.context_length(parser("icejax.generate").parse_args([*arguments]))

    assert length() == bundled[0].config.context_length
    shutil.copytree(ASSETS, tmp_path / "model")
    families.edit_config(tmp_path / "model", max_position_embeddings=200)
    assert length("--model", str(tmp_path / "model")) == 200
    assert length("--model", "org/name-of-the-hub") == 2**24
    gguf_files.without_tokenizers(monkeypatch)
    theirs = families.build(families.row("llama-gqa"), num_hidden_layers=1)
    file = gguf_files.write(theirs, tmp_path / "model.gguf", context_length=250)
    assert length("--model", str(file)) == 250
    session = icejax.Session(*bundled, cache=Full(), context_length=300)
    session.ask("x", max_new_tokens=1)
    session.save(tmp_path / "kept")
    assert length("--session", str(tmp_path / "kept")) == 300
    assert length("--session", str(tmp_path / "kept"), "--context-length", "400") == 400
    with pytest.raises(icejax.InputError, match="context_length must be at least 1, got 0"):
        length("--context-length", "0")
