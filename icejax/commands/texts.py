"""Texts from files and stdin, read up to the bytes that a context can take: what is longer is refused, and never in memory.

`icejax.commands.requests`, `chat` and `lines` call it. Example: a context of 8,192 tokens takes 1,179,648 bytes.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from icejax.checks.errors import InputError

PER_TOKEN = 16  # bytes; the tokens of a text in any language have fewer on average
TEMPLATE_BYTES = 2**20  # the most bytes of a chat template; published ones have some thousands
BESIDE = 2**20  # bytes of the names and escapes of a JSON line, and of a text for a short context
JSONL_BYTES = 2**28  # the most bytes of a .jsonl file, whose lines are in memory together, unless one prompt may have more
JSONL_LINES = 2**20  # its most lines, since the shortest prompt takes half a KiB of memory


def most_bytes(context_length: int) -> int:
    """Returns the size in bytes of the longest text that is read for a context of so many tokens."""
    return PER_TOKEN * context_length + BESIDE


def read_text(path: Path, *, context_length: int) -> str:
    """Returns the text of a file or pipe; InputError if it cannot be read, is too long or is not UTF-8."""
    try:
        with open(path, "rb") as file:
            most = most_bytes(context_length)
            if (size := _size(file)) > most:
                raise InputError(f"{path} has {size} bytes{_too_long(context_length)}")
            return _text(str(path), _bounded(str(path), file.read(most + 1), context_length))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def read_template(path: Path) -> str:
    """Returns the chat template in a file; InputError if it cannot be read, is too long for one, or is not UTF-8."""
    try:
        with open(path, "rb") as file:
            content = file.read(TEMPLATE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > TEMPLATE_BYTES:
        raise InputError(f"{path} is no chat template: expected at most {TEMPLATE_BYTES} bytes of Jinja, found more")
    return _text(str(path), content)


def read_stdin(*, context_length: int) -> str:
    """Returns the text of stdin; InputError if it is too long or not UTF-8."""
    content = sys.stdin.buffer.read(most_bytes(context_length) + 1)
    return _text("stdin", _bounded("stdin", content, context_length))


def read_lines(path: Path, *, context_length: int) -> Iterator[tuple[str, str]]:
    """Yields the place and the text of each line of a file or pipe that is not blank.

    Raises:
        InputError: as in `read_text`, or the lines are too many or have too many bytes together.
    """
    with _opened(path) as file:
        size, most = _size(file), _most_together(context_length)
        if size > most:
            raise _too_many(path, f"{size} bytes", most)
        yield from _lines(path, file, context_length)


def numbered_lines(path: Path, *, context_length: int) -> Iterator[tuple[int, int, str]]:
    """Yields the number, from 1, the first byte and the text of each line that is not blank; one is in memory at a time.

    Raises:
        InputError: as in `read_text`.
    """
    with _opened(path) as file:
        for number, start, line in _bounded_lines(path, file, context_length):
            text = _text(str(path), line, start=start)
            if text.strip():
                yield number, start, text.removesuffix("\n")


def text_at(path: Path, start: int, *, context_length: int) -> str:
    """Returns the text of the line that begins with the byte `start`; errors are those of `numbered_lines`."""
    with _opened(path) as file:
        file.seek(start)
        line = _bounded(str(path), file.readline(most_bytes(context_length) + 1).removesuffix(b"\n"), context_length)
        return _text(str(path), line, start=start)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _lines(path: Path, file: BinaryIO, context_length: int) -> Iterator[tuple[str, str]]:
    most = _most_together(context_length)
    for number, start, line in _bounded_lines(path, file, context_length):
        if number > JSONL_LINES:
            raise _too_many(path, f"more than {JSONL_LINES} lines", JSONL_LINES)
        if start + len(line) > most:
            raise _too_many(path, f"more than {most} bytes", most)
        text = _text(str(path), line, start=start)
        if text.strip():
            yield f"{path}, line {number}", text.removesuffix("\n")


def _bounded_lines(path: Path, file: BinaryIO, context_length: int) -> Iterator[tuple[int, int, bytes]]:
    number, start = 0, 0
    while line := file.readline(most_bytes(context_length) + 1):
        number += 1
        _bounded(f"{path}, line {number}", line.removesuffix(b"\n"), context_length)
        yield number, start, line
        start += len(line)


def _size(file: BinaryIO) -> int:
    """Returns the bytes of a file; 0 for a pipe or a device, whose size nobody knows."""
    status = os.fstat(file.fileno())
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _most_together(context_length: int) -> int:
    """Returns the most bytes of all lines of a file together, among them the longest line."""
    return max(JSONL_BYTES, 2 * most_bytes(context_length))


def _too_many(path: Path, count: str, most: int) -> InputError:
    return InputError(f"{path} has {count}, and a .jsonl file may have {most}: split it into several files")


def too_long(source: str, unit: str, context_length: int) -> InputError:
    """Returns the error of a text that continues beyond what its context can take, in bytes or characters."""
    return InputError(f"{source} has more than {most_bytes(context_length)} {unit}{_too_long(context_length)}")


def _too_long(context_length: int) -> str:
    return (
        f", and a context of {context_length} tokens takes at most {most_bytes(context_length)}: "
        "shorten it, or raise --context-length if the model can take it"
    )


def _bounded(source: str, content: bytes, context_length: int) -> bytes:
    if len(content) > most_bytes(context_length):
        raise too_long(source, "bytes", context_length)
    return content


def _text(source: str, content: bytes, *, start: int = 0) -> str:
    """Returns UTF-8 bytes as text, without a byte-order mark; `start` is their place in the file, for messages."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not UTF-8 text (byte {start + error.start}): convert it first") from None
    return text if start else text.removeprefix("\ufeff")
