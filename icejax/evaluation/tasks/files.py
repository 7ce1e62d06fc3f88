"""Files of a data folder: JSON lines and single JSON documents, each perhaps in gzip."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from icejax.checks.errors import InputError

FAULTS = (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError, RecursionError)


def json_lines(file: Path, row: Callable[[Any], dict[str, Any]], *, what: str, fields: str) -> list[dict[str, Any]]:
    """Returns `row` of each line.

    Args:
        row: makes a sample from a line's JSON, and fails at one that is no sample.
        what, fields: names of the samples and of a line's fields, for the message.

    Raises:
        InputError: the file is missing, empty or another.
    """
    expected = f"JSON lines{' in gzip' * (file.suffix == '.gz')} with {fields}"
    return _read(file, lambda lines: [row(json.loads(line)) for line in lines], f"no file of {what}", expected)


def json_document(file: Path, read: Callable[[Any], Any], *, what: str, fields: str) -> Any:
    """Returns `read` of a file's JSON; the file may be in gzip.

    Raises:
        InputError: the file is missing, empty or another.
    """
    return _read(file, lambda lines: read(json.load(lines)), f"not {what}", f"JSON with {fields}")


def _read(file: Path, read: Callable[[Any], Any], fault: str, expected: str) -> Any:
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
            content = read(lines)
    except FileNotFoundError:
        raise InputError(f"--data has no {file.name}: expected {file}") from None
    except FAULTS as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{file} is {fault} ({reason}): expected {expected}") from None
    if not content:
        raise InputError(f"{file} is {fault} (it is empty): expected {expected}")
    return content
