"""The user's cache directory."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """Returns the folder for what may be made again, in the user's cache directory."""
    # A user without a home keeps it below the present folder, where Path.home would raise.
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "icejax"
