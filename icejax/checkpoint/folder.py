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
from icejax.files.cache_home import cache_home

ADAPTER = "adapter_config.json"  # of a LoRA, as peft saves it
POINTER = "gguf.json"  # names the GGUF file that a folder was made of, in place of weights
ORBAX = "orbax"  # the subfolder with the parameters of an icejax folder
LOG = logging.getLogger(__name__)
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_FILE = re.compile(rf"({HUB_ID.pattern}):((?:\w[\w.+-]*/)*\w[\w.+-]*\.gguf)", re.IGNORECASE)
REVISION = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*")
# Config and tokenizer files, which a conversion copies.
COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "tekken.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"  # the subfolder with a model's other templates, such as tool_use.jinja


def resolve(model: str | Path, *, revision: str | None = None) -> Path:
    """Returns the folder of `model`: a local folder, the folder made of a GGUF file, or the snapshot of a hub id.

    Missing files of a hub id are downloaded; `org/name:FILE.gguf` is a GGUF file on the hub. A part of a split GGUF file stands
    for all parts, and a folder whose only weights are one GGUF file or set stands for that.

    Args:
        revision: branch, tag or commit of a hub id; None: its main branch.

    Raises:
        InputError: the folder does not exist, is empty or cannot be read; the GGUF file is not sound or not supported, or there
            are several; the hub id cannot be downloaded; or a folder or file is given with a revision.
    """
    if revision is not None and not (isinstance(revision, str) and REVISION.fullmatch(revision)):
        raise InputError(f"revision must be a branch, a tag or a commit, got {quoted(revision)}")
    with input_error_from(f"{model} cannot be read"):
        folder = current_folder(Path(model).expanduser())
        if folder.is_dir() or folder.is_file():
            if revision is not None:
                kind = "folder" if folder.is_dir() else "file"
                raise InputError(f"{model} is a {kind}, and only a hub id has revisions: leave revision {revision} out")
            if folder.is_dir() and not any(folder.iterdir()):
                raise InputError(f"{folder} is empty: expected a Hugging Face or icejax checkpoint folder")
            return _whole(folder) if folder.is_dir() else _of_file(folder)
        hub_file = HUB_FILE.fullmatch(str(model))
        is_file_name = hub_file is None and str(model).lower().endswith(".gguf")
        if folder.exists() or is_file_name or not (hub_file or HUB_ID.fullmatch(str(model))):
            kind = "file" if is_file_name else "folder"
            raise InputError(
                f"{model}: expected a checkpoint folder, a GGUF file or a hub id such as org/name, found no such {kind}"
            )
    if hub_file is not None:
        return _of_hub_file(*hub_file.groups(), revision)
    if str(model).lower().endswith("-gguf"):
        raise InputError(f"{model} holds GGUF files by its name: name one of them behind it, as {model}:FILE.gguf")
    patterns = [*COMPANIONS, f"{TEMPLATES}/*.jinja", ADAPTER, "model*.safetensors", "*.index.json"]
    return _whole(_snapshot(str(model), revision, patterns))


def _of_file(file: Path) -> Path:
    """Returns the folder made of a GGUF file; InputError for another file."""
    from icejax.checkpoint.gguf.folder import folder_of  # imports the gguf package
    from icejax.checkpoint.gguf.metadata import is_gguf

    if not is_gguf(file) and not file.name.lower().endswith(".gguf"):
        raise InputError(f"{file} is a file: expected a checkpoint folder, a GGUF file or a hub id such as org/name")
    return folder_of(file)


def _of_hub_file(hub_id: str, name: str, revision: str | None) -> Path:
    """Returns the folder made of a GGUF file on the hub, and of the other parts of its set."""
    import huggingface_hub

    from icejax.checkpoint.gguf.parts import part_names

    folder, *_, last = name.rpartition("/")
    parts = [f"{folder}/{part}" if folder else part for part in part_names(last)]
    snapshot = _snapshot(hub_id, revision, parts)
    if missing := [part for part in parts if not (snapshot / part).is_file()]:
        # Without a network the hub's cache gives a snapshot that lacks files.
        with input_error_from(f"{hub_id}: {missing[0]} is not in the hub's cache, and the hub cannot be asked for it"):
            huggingface_hub.file_exists(hub_id, missing[0], revision=revision)
        raise InputError(f"{hub_id} has no file {missing[0]} on the hub: expected the name of one of its GGUF files")
    with input_error_from(f"{hub_id}:{name} cannot be read"):
        return _of_file(snapshot / name)


def _whole(folder: Path) -> Path:
    """Returns a folder, or the one made of the GGUF file in it; InputError if it holds a LoRA adapter alone."""
    if (folder / ORBAX).exists():
        return folder
    file = None
    if not any(weights for weights in folder.glob("*.safetensors") if not weights.name.startswith("adapter")):
        file = _gguf_model(folder)
        if file is None and (folder / ADAPTER).is_file():
            base = read(folder / ADAPTER).get("base_model_name_or_path")
            raise InputError(
                f"{folder} is a LoRA adapter of {quoted(base)}, not a model: merge it into that model by peft's "
                "merge_and_unload, and give the folder of the result"
            )
    if (folder / ADAPTER).is_file():
        LOG.warning("%s: the LoRA adapter (%s) is not used", folder, ADAPTER)
    return folder if file is None else _of_file(file)


def _gguf_model(folder: Path) -> Path | None:
    """Returns the first file of the GGUF model in a folder; None: it has none."""
    if not any(file.name.lower().endswith(".gguf") for file in folder.iterdir()):
        return None
    from icejax.checkpoint.gguf.parts import one_in  # imports the gguf package

    return one_in(folder)


def _snapshot(hub_id: str, revision: str | None, patterns: list[str]) -> Path:
    """Returns the folder of a hub id in the hub's cache, after downloading its missing files that match `patterns`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, RevisionNotFoundError

    with input_error_from(f"{hub_id}: no such folder, and the hub does not bring it"):
        try:
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


def gguf_folders() -> Path:
    """Returns the folder in the user's cache directory in which icejax makes the folders of GGUF files."""
    return cache_home() / "gguf"


def is_made_of_gguf(folder: Path) -> bool:
    """Says whether icejax made a folder of a GGUF file, which holds its weights; elsewhere the name `POINTER` means nothing."""
    path = os.path.realpath(folder)
    return os.path.dirname(path) == os.path.realpath(gguf_folders()) and os.path.isfile(os.path.join(path, POINTER))


def companions(folder: Path) -> list[Path]:
    """Returns the config and tokenizer files; InputError for a folder, a pipe, a broken link or over 100 MiB in their place."""
    files = [folder / name for name in COMPANIONS if os.path.lexists(folder / name)]
    files += sorted(folder.glob(f"{TEMPLATES}/*.jinja"))
    for file in files:
        if not file.is_file():
            raise InputError(f"{file} is a folder, a pipe or a broken link: expected a file, or nothing of this name")
        if (size := file.stat().st_size) > MOST_BYTES:
            raise InputError(f"{file} has {size} bytes: expected at most {MOST_BYTES}")
    return files
