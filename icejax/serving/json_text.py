"""JSON as the server reads and writes it."""

from __future__ import annotations

import json
from typing import Any, NoReturn

COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def json_text(value: Any) -> str:
    """Returns a value as compact JSON."""
    return COMPACT.encode(value)


def json_bytes(value: Any) -> bytes:
    """Returns a value as compact JSON in UTF-8."""
    return json_text(value).encode(errors="replace")


def json_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in a body.

    Raises:
        ValueError: the body holds no JSON object; the message says what it holds.
    """
    try:
        value = json.loads(body, parse_constant=_no_number)
    except UnicodeDecodeError:
        raise ValueError("the body is not UTF-8") from None
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"the body is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"the body must be a JSON object, got a {type(value).__name__}")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"the body has {name}, which is no number of JSON")
