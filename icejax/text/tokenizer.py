"""The tokenizer of a checkpoint folder, for `api.generate.load`. The folder is data: none of its code is run."""

from __future__ import annotations

import base64
import inspect
import json
import logging
import math
from pathlib import Path
from typing import Any

from icejax.checkpoint.folder import companions
from icejax.checkpoint.readers.huggingface import read_json
from icejax.checks.errors import InputError, quoted
from icejax.text.tokenizer_errors import tokenizer_error_from

LOG = logging.getLogger(__name__)
# Texts on which readings of a tokenizer.json differ; short, because expressions of an unknown tokenizer may be slow.
PROBES = ("hello world", " x", "a(n):\n    b\n\n\nc", "\n\n1234567, 89", "I'm  here\t x", "nai\u0308ve 中文字 🙂")
MOST_ADDED, LONGEST_ADDED = 64, 40  # number of a file's added tokens that are compared, and characters of one
TOKENIZER = "tokenizer.json"
MOST_GROWTH = 100  # times a tokenizer may lengthen a text; published models' tokenizers stay at some tens


def load_tokenizer(folder: Path) -> Any:
    """Returns the transformers tokenizer of a checkpoint folder.

    None of the folder's code or pickles is run; nothing is downloaded, and the user is asked nothing. Where transformers' class
    gives other token ids than the folder's tokenizer.json, the file is read by transformers' plain class, as the log tells.

    Raises:
        InputError: the tokenizer's files are missing or broken, only the folder's own code can read them, or the tokenizer may
            lengthen a text more than `MOST_GROWTH` times.
    """
    from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast  # takes seconds to import

    config, file = read_json(folder / "config.json"), folder / "tokenizer_config.json"
    settings = read_json(file) if file in companions(folder) else {}
    if (others := settings.get("fast_tokenizer_files")) not in (None, [TOKENIZER]):
        raise InputError(f"{file}: fast_tokenizer_files is {quoted(others)}: expected {TOKENIZER} alone; leave the field out")
    known = [_is_known(folder, fields.get("tokenizer_class")) for fields in (settings, config)]
    mapped = settings.get("auto_map")
    if (mapped.get("AutoTokenizer") if isinstance(mapped, dict) else mapped) and not any(known):
        raise InputError(
            f"{folder}: the tokenizer needs the folder's own code (auto_map in {file.name}), which is never run: "
            "expected a tokenizer_class that transformers has"
        )
    with tokenizer_error_from(f"{folder} has no tokenizer that loads"):
        # The config is made here, because parsing the folder's could fail over the model's fields, or look for its code.
        config_class = CONFIG_MAPPING[config["model_type"]] if config["model_type"] in CONFIG_MAPPING else PreTrainedConfig
        made_config = config_class(tokenizer_class=config.get("tokenizer_class"))
        tokenizer = AutoTokenizer.from_pretrained(folder, config=made_config, trust_remote_code=False, local_files_only=True)
        if not _reads_as_its_file(tokenizer, folder):
            LOG.info("%s reads text otherwise than the folder's tokenizer file, which is used", type(tokenizer).__name__)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        growth = _growth(getattr(tokenizer, "backend_tokenizer", None))
    names = tokenizer.vocab_files_names.values()
    vocabularies = [*folder.glob("tokenizer.*"), *folder.glob("tekken.json")]
    if names and not vocabularies and not any((folder / name).exists() for name in names):
        raise InputError(f"{folder} has no vocabulary file: expected {' or '.join(names)}")
    if growth > MOST_GROWTH:
        raise InputError(
            f"{folder}: the tokenizer may lengthen a text {growth:.3g} times: "
            f"expected at most {MOST_GROWTH} times; look at what tokenizer.json replaces and repeats"
        )
    return tokenizer


def _reads_as_its_file(tokenizer: Any, folder: Path) -> bool:
    """Says whether a tokenizer gives the token ids of the folder's tokenizer.json, for `PROBES` and the file's added tokens.

    Example: a folder of `Qwen2Tokenizer` whose tokenizer.json splits numbers. The class reads its vocabulary alone and splits
    text in its own way: "1234567" gives other token ids. A tekken.json is always read by the plain class: that of the package
    mistral-common has no chat template and reads [INST] as text.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    file = folder / TOKENIZER
    if type(tokenizer) is PreTrainedTokenizerFast:  # the plain class reads the file itself
        return True
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return not any((folder / name).exists() for name in (file.name, "tekken.json"))
    if not file.exists():
        return True
    backend = Tokenizer.from_file(str(file))
    if _growth(backend) > MOST_GROWTH:
        return False  # the plain class is then refused
    backend.no_truncation()
    backend.no_padding()
    names = [token.content for token in backend.get_added_tokens_decoder().values() if len(token.content) <= LONGEST_ADDED]
    texts = [*PROBES, *names[:MOST_ADDED], *(f"{name} x" for name in names[:MOST_ADDED])]
    ids = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    return ids == [backend.encode(text, add_special_tokens=False).ids for text in texts]


def _growth(fast: Any) -> float:
    """Returns how many times a tokenizer may lengthen a text: normalizer times template, or decoder if that is more.

    Example: a normalizer that replaces "a" by "bb" and a template that adds one special token: 2 * 2 = 4.

    Args:
        fast: a tokenizer of the tokenizers library; any other counts as 1.
    """
    from tokenizers import Tokenizer

    if not isinstance(fast, Tokenizer):
        return 1.0
    parts = fast.normalizer, fast.post_processor, fast.decoder
    normalizer, template, decoder = (1.0 if part is None else _step_growth(json.loads(part.__getstate__())) for part in parts)
    return max(normalizer * template, decoder)


def _step_growth(step: dict) -> float:
    """Returns how many times a step, in the tokenizers library's JSON, may lengthen a text; steps of a sequence multiply."""
    match step:
        case {"normalizers": steps} | {"processors": steps} | {"decoders": steps}:
            return math.prod(map(_step_growth, steps))
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": content} if pattern:
            return max(1.0, len(content) / len(pattern))
        case {"type": "Replace", "content": content} | {"type": "Prepend", "prepend": content}:
            return 1.0 + len(content)  # an expression may match the empty string at every character
        case {"type": "Precompiled", "precompiled_charsmap": str(coded)}:
            table = base64.b64decode(coded)
            return max(1.0, *map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")))
        case {"type": "TemplateProcessing", "single": pieces, "special_tokens": special}:  # largest for a text of one token
            names = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
            return max(1.0, len(pieces) - len(names) + sum(len(special[name]["ids"]) for name in names))
    return 1.0


def _is_known(folder: Path, name: Any) -> bool:
    """Says whether transformers has the tokenizer class `name`; InputError if transformers uses the name for something else.

    transformers would load any of its classes by name, such as AutoModel, which asks whether to run the folder's code.
    """
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if name is None:
        return False
    if not isinstance(name, str):
        raise InputError(f"{folder}: tokenizer_class must be a name, found {name!r}")
    classes = [tokenizer_class_from_name(variant) for variant in (name, name.removesuffix("Fast") + "Fast")]
    for kind in classes:
        if kind is not None and not (inspect.isclass(kind) and issubclass(kind, PreTrainedTokenizerBase)):
            raise InputError(
                f"{folder}: tokenizer_class {name!r} is no tokenizer: expected one such as PreTrainedTokenizerFast"
            )
    return any(kind is not None for kind in classes)
