"""Answers of an evaluation, in a file of JSON lines, so that an interrupted run continues where it ended.

The first line says which model and cache answered; each other line has the SHA-256 of a request, its answer, and what the
answer took.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from icejax.checks.errors import InputError
from icejax.files import private
from icejax.files.whole_lines import WholeLines
from icejax.runtime import processes


class Answers:
    """Answers by the key of their request; without a file they are forgotten at the end."""

    def __init__(self, file: Path | None = None, identity: dict[str, Any] | None = None) -> None:
        """Reads the file, or begins it; the last line is dropped if it is not whole.

        Args:
            identity: names the model and its cache, as JSON.

        Raises:
            InputError: the file cannot be read or written, another process writes it, it is no such file, or its answers are of
                another model or cache.
        """
        self._answers: dict[str, Any] = {}
        self._measured: dict[str, dict[str, Any]] = {}
        self._lines, self._path, self._is_begun = None, file, False
        if file is None:
            return
        self._first = json.dumps(identity, sort_keys=True).encode()
        try:
            self._lines = WholeLines(file, file.open("r+b") if file.exists() else private.new_file(file), self._take)
            if not self._lines.size:
                self._lines.add(self._first)
        except OSError as error:
            raise self._unusable(error) from None

    def _unusable(self, error: OSError) -> InputError:
        return InputError(f"{self._path} cannot be used: {error.strerror}")

    def _take(self, line: bytes) -> None:
        """Takes an answer of the file, or its first line."""
        if not self._is_begun and not (self._first + b"\n").startswith(line):
            raise InputError(
                f"{self._path} has answers of another model, cache, context length or version: give another --output"
            )
        if line.endswith(b"\n") and self._is_begun:
            try:
                answer = json.loads(line)
                self._keep(answer["request"], answer["answer"], answer["measured"])
            except (ValueError, KeyError, TypeError, RecursionError):
                raise InputError(f"{self._path} is no file of answers: give another --output, or remove it") from None
        self._is_begun = True

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

    def share(self) -> None:
        """Gives all processes of a group the first one's answers; all call it."""
        self._answers, self._measured = processes.from_first([self._answers, self._measured])

    def _keep(self, key: str, answer: Any, measured: dict[str, Any]) -> None:
        self._answers[key], self._measured[key] = answer, measured

    def add(self, key: str, answer: Any, measured: dict[str, Any]) -> None:
        """Takes an answer and its cost, and writes both to the file at once; InputError if it cannot be written."""
        self._keep(key, answer, measured)
        if self._lines is None:
            return
        try:
            self._lines.add(json.dumps(dict(request=key, answer=answer, measured=measured)).encode())
        except OSError as error:
            raise self._unusable(error) from None

    def close(self) -> None:
        """Lets another process write the file; the answers stay here."""
        if self._lines is not None:
            self._lines.close()
