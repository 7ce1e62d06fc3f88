"""Names of answers."""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    """Returns a new id, such as `chatcmpl-8c0f...`."""
    return f"{prefix}-{secrets.token_hex(12)}"
