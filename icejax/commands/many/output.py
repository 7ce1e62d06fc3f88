"""The file of answers: an object per line, in the order in which they ended. `icejax.commands.many.run` calls it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from icejax.checks.errors import InputError
from icejax.commands.many.lines import Line
from icejax.files.whole_lines import WholeLines

BEGIN = b'{"line": '  # of every line of answers


class Output:
    """Answers in a file.

    Attributes:
        keys: keys of the lines that have an answer.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file, or makes it; one process at a time may have it.

        Raises:
            InputError: the file cannot be written, is no file of answers, or another process writes it.
        """
        self._path, self.keys = path, set[str]()
        try:
            self._lines = WholeLines(path, path.open("x+b") if not path.exists() else path.open("r+b"), self._take)
        except OSError as error:
            raise InputError(f"{path} cannot be used: {error.strerror or error}") from None

    def check(self, lines: list[Line]) -> None:
        """Raises InputError if an answer in the file is none of these lines'."""
        strangers = len(self.keys - {line.key for line in lines})
        if strangers:
            raise InputError(
                f"{self._path} has {strangers} answers to other lines, or with another model, cache or options: "
                "give another --output, or the prompt file and options of then"
            )

    def add(self, line: Line, fields: dict[str, Any]) -> None:
        """Writes an answer, unless the line has one; InputError: the disk is full or broken."""
        if line.key not in self.keys:
            text = json.dumps({"line": line.number, "key": line.key} | fields, ensure_ascii=False)
            try:
                self._lines.add(text.encode())
            except OSError as error:
                raise InputError(f"{self._path} cannot be written: {error.strerror}; what was written before is kept") from None
            self.keys.add(line.key)

    def close(self) -> None:
        """Lets another process write the file."""
        with contextlib.suppress(OSError):  # of what `add` could not write
            self._lines.close()

    def _take(self, line: bytes) -> None:
        try:
            if not BEGIN.startswith(line[: len(BEGIN)]):
                raise ValueError
            if line.endswith(b"\n"):
                self.keys.add(json.loads(line)["key"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InputError(f"{self._path} is no file of answers: give another --output, or remove it") from None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Output]:
    """Yields the file of answers; another process may write it after the block."""
    with contextlib.closing(Output(path)) as output:
        yield output
