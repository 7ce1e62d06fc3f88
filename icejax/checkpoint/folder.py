"""Finds a checkpoint folder, and the config and tokenizer files beside its weights.

`icejax.checkpoint.load` and `icejax.checkpoint.convert` call it.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from icejax.checks.errors import InputError, input_error_from, quoted
from icejax.checks.json_file import MOST_BYTES, read
from icejax.files.atomic_folder import current_folder

ADAPTER = "adapter_config.json"  # of a LoRA, as peft saves it
ORBAX = "orbax"  # the subfolder with the parameters of an icejax folder
LOG = logging.getLogger(__name__)
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
REVISION = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*")
# Config and tokenizer files, which a conversion copies.
COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def resolve(model: str | Path, *, revision: str | None = None) -> Path:
    """Returns the folder of `model`: a local folder, or the snapshot of a hub id, downloaded where it is missing.

    Args:
        revision: branch, tag or commit of a hub id; None: its main branch.

    Raises:
        InputError: the folder does not exist, is empty or cannot be read, or holds GGUF instead of safetensors; or the hub id
            cannot be downloaded; or a folder is given with a revision.
    """
    if revision is not None and not (isinstance(revision, str) and REVISION.fullmatch(revision)):
        raise InputError(f"revision must be a branch, a tag or a commit, got {quoted(revision)}")
    with input_error_from(f"{model} cannot be read"):
        folder = current_folder(Path(model).expanduser())
        if _is_gguf(folder):
            raise InputError(f"{model} is GGUF, which is not read: fetch the model's safetensors, and round them by --quantize")
        if folder.is_dir():
            if revision is not None:
                raise InputError(f"{model} is a folder, and only a hub id has revisions: leave revision {revision} out")
            if not any(folder.iterdir()):
                raise InputError(f"{folder} is empty: expected a Hugging Face or icejax checkpoint folder")
            return _whole(folder)
        if folder.exists() or not HUB_ID.fullmatch(str(model)):
            raise InputError(f"{model}: expected a checkpoint folder or a hub id such as org/name, found no such folder")
    return _whole(_snapshot(str(model), revision))


def _whole(folder: Path) -> Path:
    """Returns a folder; InputError if it holds a LoRA adapter alone."""
    if (folder / ADAPTER).is_file() and not (folder / ORBAX).exists():
        base = read(folder / ADAPTER).get("base_model_name_or_path")
        if not any(file for file in folder.glob("*.safetensors") if not file.name.startswith("adapter")):
            raise InputError(
                f"{folder} is a LoRA adapter of {quoted(base)}, not a model: merge it into that model by peft's "
                "merge_and_unload, and give the folder of the result"
            )
        LOG.warning("%s: the LoRA adapter (%s) is not used", folder, ADAPTER)
    return folder


def _snapshot(hub_id: str, revision: str | None) -> Path:
    """Returns the folder of a hub id in the hub's cache, after downloading what is missing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, RevisionNotFoundError

    with input_error_from(f"{hub_id}: no such folder, and the hub does not bring it"):
        try:
            patterns = [*COMPANIONS, ADAPTER, "model*.safetensors", "*.index.json"]
            return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
        except RevisionNotFoundError:
            raise InputError(f"{hub_id} has no revision {revision} on the hub: expected a branch, a tag or a commit") from None
        except LocalEntryNotFoundError as error:
            cause = error.__cause__
            if isinstance(cause, HfHubHTTPError):  # the hub was reached, and refused
                raise cause from None
            offline = isinstance(cause, OfflineModeIsEnabled)
            why = "HF_HUB_OFFLINE forbids the network" if offline else f"no network reaches the hub ({cause})"
            raise InputError(
                f"{hub_id}: no such folder, its files are not all in the hub's cache, and {why}: "
                "connect, or give the folder of a model that is on this machine"
            ) from None


def _is_gguf(folder: Path) -> bool:
    """Says whether a model is GGUF: a folder by its files, a file or a hub id by the end of its name."""
    if folder.is_dir():
        return any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors")) and not (folder / ORBAX).exists()
    return folder.name.lower().endswith("gguf")


def companions(folder: Path) -> list[Path]:
    """Returns the config and tokenizer files; InputError for a folder, a pipe, a broken link or over 100 MiB in their place."""
    files = [folder / name for name in COMPANIONS if os.path.lexists(folder / name)]
    for file in files:
        if not file.is_file():
            raise InputError(f"{file} is a folder, a pipe or a broken link: expected a file, or nothing of this name")
        if (size := file.stat().st_size) > MOST_BYTES:
            raise InputError(f"{file} has {size} bytes: expected at most {MOST_BYTES}")
    return files
