"""Names of answers."""

from __future__ import annotations

import secrets


def new_id(prefix: str, mark: str = "-") -> str:
    """Returns a new id, such as `chatcmpl-8c0f...`; `mark` stands between its parts."""
    return f"{prefix}{mark}{secrets.token_hex(12)}"
