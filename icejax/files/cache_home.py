"""The user's cache directory. `icejax.checkpoint.folder` and `icejax.runtime` call it."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """Returns icejax's folder in the user's cache directory; what it holds can be computed again."""
    # Without a home directory this is a folder named ~ in the working directory; Path.home would raise.
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "icejax"
