"""The models that policies are compared on: the bundled one, and a panel of others that `bench.needle.train` has trained."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import icejax
from icejax.generation import ASSETS
from icejax.models import CausalLM

FOLDER = Path(__file__).parent / "needle" / "panel"


def folders(first: Path | str = ASSETS, *, panel: bool = False) -> dict[str, Path | str]:
    """Returns the folders of the models by name: the first one, and with `panel` the others."""
    others = sorted(path.parent for path in FOLDER.glob("*/config.json")) if panel else []
    return {"bundled" if first == ASSETS else str(first): first} | {path.name: path for path in others}


def models(
    first: Path | str = ASSETS, *, panel: bool = False, only: Collection[str] | None = None, dtype: str | None = None
) -> Iterator[tuple[str, CausalLM]]:
    """Yields the models of `folders`, or only some of them, one after another, each loaded when it is its turn."""
    for name, folder in folders(first, panel=panel).items():
        if only is None or name in only:
            yield name, icejax.load(folder, dtype=dtype)[0]
