"""The tokenizer of a checkpoint folder. The folder is data: nothing in it is run."""

from __future__ import annotations

import base64
import inspect
import json
import math
from pathlib import Path
from typing import Any

from icejax.checkpoint.folder import companions
from icejax.checkpoint.readers.huggingface import read_json
from icejax.checks.errors import InputError, input_error_from

MOST_GROWTH = 100  # times the text, of all that a tokenizer replaces; those of published models at most some tens


def load_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer of a checkpoint folder; none of its code or pickles is run, and nothing is asked or fetched.

    Raises:
        InputError: the tokenizer's files are missing or broken, or only the folder's own code can read them.
    """
    from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig  # takes seconds to import

    config, file = read_json(folder / "config.json"), folder / "tokenizer_config.json"
    settings = read_json(file) if file in companions(folder) else {}
    if others := [each for each in folder.glob("additional_chat_templates/*") if not each.is_file()]:
        raise InputError(f"{others[0]} is no file: expected a chat template")
    known = [_is_known(folder, fields.get("tokenizer_class")) for fields in (settings, config)]
    mapped = settings.get("auto_map")
    if (mapped.get("AutoTokenizer") if isinstance(mapped, dict) else mapped) and not any(known):
        raise InputError(
            f"{folder}: the tokenizer needs the folder's own code (auto_map in {file.name}), which is never run: "
            "expected a tokenizer_class that transformers has"
        )
    with input_error_from(f"{folder} has no tokenizer that loads"):
        # A config made here: parsing the folder's could fail for reasons of the model, or look for its code.
        of = CONFIG_MAPPING[config["model_type"]] if config["model_type"] in CONFIG_MAPPING else PreTrainedConfig
        kind = of(tokenizer_class=config.get("tokenizer_class"))
        tokenizer = AutoTokenizer.from_pretrained(folder, config=kind, trust_remote_code=False, local_files_only=True)
        growth = _growth(tokenizer)
    names = tokenizer.vocab_files_names.values()
    if names and not any((folder / name).exists() for name in names) and not [*folder.glob("tokenizer.*")]:
        raise InputError(f"{folder} has no vocabulary, of which transformers would make none: expected {' or '.join(names)}")
    if growth > MOST_GROWTH:
        raise InputError(
            f"{folder}: the tokenizer may make {growth:.3g} times as much of a text, which no memory may hold: "
            f"expected at most {MOST_GROWTH} times; look at what tokenizer.json replaces and repeats"
        )
    return tokenizer


def _growth(tokenizer: Any) -> float:
    """Returns by how much a tokenizer may lengthen a text: its normalizers and templates together, or its decoders."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return 1.0
    fast = tokenizer.backend_tokenizer
    parts = fast.normalizer, fast.post_processor, fast.decoder
    before, behind, back = (1.0 if part is None else _grown(json.loads(part.__getstate__())) for part in parts)
    return max(before * behind, back)


def _grown(step: dict) -> float:
    """Returns by how much a step lengthens a text at most, as the tokenizers library writes it down; a sequence's multiply."""
    match step:
        case {"normalizers": steps} | {"processors": steps} | {"decoders": steps}:
            return math.prod(map(_grown, steps))
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": content} if pattern:
            return max(1.0, len(content) / len(pattern))
        case {"type": "Replace", "content": content} | {"type": "Prepend", "prepend": content}:
            return 1.0 + len(content)  # where an expression matches nothing, too
        case {"type": "Precompiled", "precompiled_charsmap": str(coded)}:
            table = base64.b64decode(coded)
            return max(1.0, *map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")))
        case {"type": "TemplateProcessing", "single": pieces, "special_tokens": special}:  # as if the text had one token
            names = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
            return max(1.0, len(pieces) - len(names) + sum(len(special[name]["ids"]) for name in names))
    return 1.0


def _is_known(folder: Path, name: Any) -> bool:
    """Says whether transformers has the tokenizer class `name`; InputError if that is another thing of its.

    It would load any class by its name, as AutoModel, which asks whether to run the folder's code.
    """
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if name is None:
        return False
    if not isinstance(name, str):
        raise InputError(f"{folder}: tokenizer_class must be a name, found {name!r}")
    classes = [tokenizer_class_from_name(each) for each in (name, name.removesuffix("Fast") + "Fast")]
    for each in classes:
        if each is not None and not (inspect.isclass(each) and issubclass(each, PreTrainedTokenizerBase)):
            raise InputError(
                f"{folder}: tokenizer_class {name!r} is no tokenizer: expected one such as PreTrainedTokenizerFast"
            )
    return any(each is not None for each in classes)
