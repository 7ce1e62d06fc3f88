"""Parquet files of prompts, whose columns are the keys of a .jsonl line, and of answers. It needs pyarrow."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet

from icejax.checks.errors import InputError, input_error_from
from icejax.engine.response import GenerationResponse, RunReport
from icejax.files.unfinished import unfinished

TYPES = {"str": pyarrow.string(), "int": pyarrow.int64(), "float": pyarrow.float64()}
TYPES["tuple[int, ...]"] = pyarrow.list_(pyarrow.int64())
TOGETHER = 256  # rows in memory at once


def rows(path: Path) -> Iterator[tuple[int, int, str]]:
    """Yields the number of each row, from 1, its place and its JSON; InputError if the file cannot be read."""
    place = 0
    with _opened(path) as file:
        batches = file.iter_batches(batch_size=TOGETHER)
        while True:
            with _errors_told(path):
                some = next((batch.to_pylist() for batch in batches), None)
            if some is None:
                return
            for row in some:
                yield place + 1, place, _text(path, place, row)
                place += 1


class Rows:
    """Rows of a file by their places; those at ascending places are read in one pass."""

    def __init__(self, path: Path) -> None:
        """Opens the file; InputError if it cannot be read."""
        self._path, self._rows, self._next = path, rows(path), 0

    def text_at(self, place: int) -> str:
        """Returns the JSON of a row."""
        if place < self._next:
            self._rows, self._next = rows(self._path), 0
        row = next(itertools.islice(self._rows, place - self._next, None), None)
        if row is None:
            raise InputError(f"{self._path} has changed since the run began, and has fewer rows: begin the run again")
        self._next = place + 1
        return row[2]


def check_output(path: Path) -> None:
    """Raises InputError if a file is no table of answers, which a run may replace."""
    if path.exists() and _opened(path).schema_arrow.names != _schema().names:
        raise InputError(f"{path} is no file of answers: give another --output")


def write(answers: Path, path: Path) -> None:
    """Writes the answers of a file of JSON lines as a Parquet file, which replaces `path` when it is whole.

    Values without a column type, such as logprobs, are JSON; an id is text.
    """
    with input_error_from(f"{path} cannot be written"), answers.open("rb") as lines:
        part = path.with_name(f".{path.name}.part")
        with unfinished(part):
            with parquet.ParquetWriter(part, _schema()) as writer:
                while some := list(itertools.islice(lines, TOGETHER)):
                    writer.write_batch(pyarrow.RecordBatch.from_pylist([_row(json.loads(line)) for line in some], _schema()))
            os.rename(part, path)


def _opened(path: Path) -> parquet.ParquetFile:
    with _errors_told(path):
        return parquet.ParquetFile(path)


def _errors_told(path: Path) -> AbstractContextManager[None]:
    return input_error_from(f"{path} cannot be read as a Parquet file")


def _text(path: Path, place: int, row: dict[str, Any]) -> str:
    try:
        return json.dumps(_filled(row), ensure_ascii=False)
    except TypeError as error:
        raise InputError(f"{path}, line {place + 1}: {error}: expected texts, numbers, lists and structs") from None


def _filled(value: Any) -> Any:
    """Returns a value without the nulls that Parquet has in the place of names that a row leaves out."""
    if isinstance(value, dict):
        return {name: _filled(other) for name, other in value.items() if other is not None}
    return [_filled(other) for other in value] if isinstance(value, list) else value


def _schema() -> pyarrow.Schema:
    columns = {"line": pyarrow.int64(), "key": pyarrow.string(), "id": pyarrow.string()}
    for field in (*dataclasses.fields(GenerationResponse), *dataclasses.fields(RunReport)):
        columns[field.name] = TYPES.get(field.type.removesuffix(" | None"), pyarrow.string())
    for other in ("row", "run", "prompt_logprobs", "attention"):  # not in an answer as JSON
        del columns[other]
    return pyarrow.schema(list(columns.items()))


def _row(fields: dict[str, Any]) -> dict[str, Any]:
    nested = {name: json.dumps(fields[name]) for name in ("logprobs", "reasoning_content") if fields.get(name) is not None}
    return fields | nested | {"id": None if fields.get("id") is None else str(fields["id"])}
