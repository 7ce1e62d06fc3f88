"""The models that the benches measure: the bundled one, and the panel that `bench.needle.train` has trained."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import icejax
from icejax.api.generate import ASSETS
from icejax.checks.errors import InputError
from icejax.models.decoder import CausalLM

FOLDER = Path(__file__).parent / "needle" / "panel"


def folders(first: Path | str = ASSETS, *, panel: bool = False) -> dict[str, Path | str]:
    """Returns the folders of models by name: the first model, and with `panel` the models of the panel."""
    panel_folders = sorted(path.parent for path in FOLDER.glob("*/config.json")) if panel else []
    return {"bundled" if first == ASSETS else str(first): first} | {path.name: path for path in panel_folders}


def models(
    first: Path | str = ASSETS, *, panel: bool = False, only: Collection[str] | None = None, dtype: str | None = None
) -> Iterator[tuple[str, CausalLM]]:
    """Yields the names and models of `folders`, or those in `only`; each model is loaded when it is its turn."""
    for name, folder in folders(first, panel=panel).items():
        if only is None or name in only:
            yield name, load(folder, dtype=dtype)


def load(folder: Path | str, *, dtype: str | None = None) -> CausalLM:
    """Returns the model of a folder; InputError if its tokens are not bytes, because the texts of the benches are bytes."""
    model, tokenizer = icejax.load(folder, dtype=dtype)
    if not reads_bytes(tokenizer):
        raise InputError(f"{folder} must have a tokenizer of bytes, as the bundled model has and those of bench/needle/panel")
    return model


def reads_bytes(tokenizer: Any) -> bool:
    """Returns whether the tokens of a text are its bytes."""
    text = "Pass key tb: 94864.\n"
    return tokenizer.encode(text, add_special_tokens=False) == list(text.encode())
