"""Where a checkpoint is, and what belongs to it beside the weights."""

from __future__ import annotations

import os
import re
from pathlib import Path

from icejax.checks.errors import InputError, input_error_from
from icejax.checks.json_file import MOST_BYTES
from icejax.files.atomic_folder import current_folder

ORBAX = "orbax"  # the folder's parameters, in icejax's own form
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# What travels with the weights from one form to the other.
COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def resolve(model: str | Path) -> Path:
    """Returns the folder of `model`: itself, or the snapshot of a hub id, downloaded if need be.

    Raises:
        InputError: there is no such folder, it cannot be read, it holds GGUF instead of safetensors, or the hub does not bring
            it.
    """
    with input_error_from(f"{model} cannot be read"):
        folder = current_folder(Path(model).expanduser())
        if _is_gguf(folder):
            raise InputError(f"{model} is GGUF, which is not read: fetch the model's safetensors, and round them by --quantize")
        if folder.is_dir():
            if not any(folder.iterdir()):
                raise InputError(f"{folder} is empty: expected a Hugging Face or icejax checkpoint folder")
            return folder
        if folder.exists() or not HUB_ID.fullmatch(str(model)):
            raise InputError(f"{model}: expected a checkpoint folder or a hub id such as org/name, found no such folder")
    from huggingface_hub import snapshot_download

    with input_error_from(f"{model}: no such folder, and the hub does not bring it"):
        return Path(snapshot_download(str(model), allow_patterns=[*COMPANIONS, "model*.safetensors", "*.index.json"]))


def _is_gguf(folder: Path) -> bool:
    """Tells a file by its ending, a folder by its files, and what is still on the hub by its name there."""
    if folder.is_dir():
        return any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors")) and not (folder / ORBAX).exists()
    return folder.name.lower().endswith("gguf")


def companions(folder: Path) -> list[Path]:
    """Returns config and tokenizer files; InputError for one that is no file, as a link that leads nowhere, or too large."""
    found = [folder / name for name in COMPANIONS if os.path.lexists(folder / name)]
    for file in found:
        if not file.is_file():
            raise InputError(f"{file} is a folder, a pipe or a broken link: expected a file, or nothing of this name")
        if (size := file.stat().st_size) > MOST_BYTES:
            raise InputError(f"{file} has {size} bytes: expected at most {MOST_BYTES}")
    return found
