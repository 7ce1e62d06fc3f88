"""Reads JSON objects from files of unknown origin. `icejax.checkpoint` and `icejax.commands` call it."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from icejax.checks.errors import InputError, quoted

MOST_BYTES = 100 * 2**20


def read(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file of at most 100 MiB; a byte-order mark is skipped.

    Raises:
        FileNotFoundError: the file does not exist; the caller says what the file is for.
        InputError: the file cannot be read, is larger than 100 MiB, or does not hold a JSON object.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path} is no file: expected one with a JSON object")
        if status.st_size > MOST_BYTES:
            raise InputError(f"{path} has {status.st_size} bytes: expected a JSON object of at most {MOST_BYTES}")
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no UTF-8 text (byte {error.start}): expected a JSON object") from None
    return parse(text, source=str(path))


def parse(text: str, *, source: str) -> dict[str, Any]:
    """Returns the JSON object in `text`.

    Raises:
        InputError: `text` is not a JSON object, or has a name twice in one object; the message begins with `source`.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise InputError(f"{source}: not valid JSON here (nested too deeply)") from None
    except ValueError as error:
        raise InputError(f"{source}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{source}: expected a JSON object, found a {type(value).__name__}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of these pairs; ValueError if a name occurs twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{quoted(twice)} is given twice")
    return fields
