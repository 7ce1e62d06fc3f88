"""The models that the benches measure: the bundled one, the panel that `bench.needle.train` has trained, and any other."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import icejax
from bench import published
from icejax.api.generate import ASSETS
from icejax.checks.errors import InputError
from icejax.models.decoder import CausalLM

ANY = "a folder, a GGUF file, or a name of bench.published (default: the bundled model)"  # help of --model
FOLDER = Path(__file__).parent / "needle" / "panel"


def folders(first: Path | str = ASSETS, *, panel: bool = False) -> dict[str, Path | str]:
    """Returns the folders of models by name: the first model, and with `panel` the models of the panel.

    Raises:
        InputError: the first model has the name of one of the panel.
    """
    name = "bundled" if first == ASSETS else Path(first).name
    of_panel = {path.parent.name: path.parent for path in sorted(FOLDER.glob("*/config.json"))} if panel else {}
    if name in of_panel:
        raise InputError(f"{first} must have another name than the panel's {', '.join(of_panel)}: rename it, or omit --panel")
    return {name: first} | of_panel


def models(
    first: Path | str = ASSETS, *, panel: bool = False, only: Collection[str] | None = None, dtype: str | None = None
) -> Iterator[tuple[str, CausalLM]]:
    """Yields the names and models of `folders`, or those in `only`; each model is loaded when it is its turn."""
    for name, folder in folders(first, panel=panel).items():
        if only is None or name in only:
            yield name, load(folder, dtype=dtype)


def readers(
    first: Path | str = ASSETS, *, panel: bool = False, dtype: str | None = None
) -> Iterator[tuple[str, CausalLM, Any]]:
    """Yields the names, models and tokenizers of `folders`; the first model may have any tokenizer."""
    for name, folder in folders(first, panel=panel).items():
        yield name, *read(folder, dtype=dtype)


def read(source: Path | str, *, dtype: str | None = None) -> tuple[CausalLM, Any]:
    """Returns the model and the tokenizer of a folder, a GGUF file, a hub id, or a name of `bench.published`."""
    name = str(source)
    if name in published.MODELS:
        source = published.gguf(name, say=lambda line: print(line, file=sys.stderr, flush=True))
    return icejax.load(source, dtype=dtype)


def load(folder: Path | str, *, dtype: str | None = None) -> CausalLM:
    """Returns the model of a folder; InputError if its tokens are not bytes, because the texts of the benches are bytes."""
    model, tokenizer = read(folder, dtype=dtype)
    if not reads_bytes(tokenizer):
        raise InputError(f"{folder} must have a tokenizer of bytes, as the bundled model has and those of bench/needle/panel")
    return model


def reads_bytes(tokenizer: Any) -> bool:
    """Returns whether the tokens of a text are its bytes."""
    text = "Pass key tb: 94864.\n"
    return tokenizer.encode(text, add_special_tokens=False) == list(text.encode())
