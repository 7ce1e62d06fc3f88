"""Answers of an evaluation, in a file of JSON lines, so that an interrupted run goes on where it ended.

The first line says which model and cache answered; each other line has the SHA-256 of a request, its answer, and what the
answer took.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from icejax.checks.errors import InputError
from icejax.files import private


class Answers:
    """Answers by the key of their request; without a file they are forgotten at the end."""

    def __init__(self, file: Path | None = None, identity: dict[str, Any] | None = None) -> None:
        """Reads the file, or begins it; the last line is dropped if it is not whole.

        Args:
            identity: names the model and its cache, as JSON.

        Raises:
            InputError: the file cannot be read or written, is no such file, or its answers are of another model or cache.
        """
        self._answers: dict[str, Any] = {}
        self._measured: dict[str, dict[str, Any]] = {}
        self._file = None
        if file is None:
            return
        first = json.dumps(identity, sort_keys=True).encode() + b"\n"
        try:
            self._file = file.open("r+b") if file.exists() else private.new_file(file)
            size = self._read(file, first) if self._file.readable() else 0
            self._file.truncate(size)
            self._file.seek(size)
            self._file.write(b"" if size else first)
            self._file.flush()
        except OSError as error:
            raise InputError(f"{file} cannot be used: {error.strerror}") from None

    def _read(self, file: Path, first: bytes) -> int:
        """Takes the answers of the file; returns the bytes of its whole lines."""
        size = 0
        for line in self._file:
            if size == 0 and not first.startswith(line):
                raise InputError(f"{file} has answers of another model, cache or context length: give another --output")
            if not line.endswith(b"\n"):
                break
            try:
                if size:
                    answer = json.loads(line)
                    self._keep(answer["request"], answer["answer"], answer["measured"])
            except (ValueError, KeyError, TypeError, RecursionError):
                raise InputError(f"{file} is no file of answers: give another --output, or remove it") from None
            size += len(line)
        return size

    @staticmethod
    def key(request: Any) -> str:
        """Returns the SHA-256 of a request, which is JSON."""
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()

    def __contains__(self, key: str) -> bool:
        return key in self._answers

    def __getitem__(self, key: str) -> Any:
        return self._answers[key]

    def measured(self, key: str) -> dict[str, Any]:
        """Returns the tokens, seconds and bytes that an answer took."""
        return self._measured[key]

    def _keep(self, key: str, answer: Any, measured: dict[str, Any]) -> None:
        self._answers[key], self._measured[key] = answer, measured

    def add(self, key: str, answer: Any, measured: dict[str, Any]) -> None:
        """Takes an answer and its cost, and writes both to the file at once."""
        self._keep(key, answer, measured)
        if self._file is not None:
            self._file.write(json.dumps(dict(request=key, answer=answer, measured=measured)).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
