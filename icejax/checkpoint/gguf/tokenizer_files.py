"""The tokenizer in a GGUF file's metadata, as the files of a Hugging Face folder. The reader of GGUF files calls it.

`icejax.text.tokenizer` reads the files as it reads a published folder's. A chat template is text here; nothing runs it.
"""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import numpy as np

from icejax.checkpoint.folder import TEMPLATES
from icejax.checkpoint.gguf.merges import derived_merges, written_merges
from icejax.checkpoint.gguf.pre_tokenizers import pre_tokenizer
from icejax.checkpoint.gguf.vocabulary import PREFIX, SPACE, USER_DEFINED, Vocabulary, read_vocabulary, take, token_id
from icejax.checks.errors import InputError, input_error_from, quoted
from icejax.checks.json_file import MOST_BYTES

LOG = logging.getLogger(__name__)
MODELS = {"gpt2": "byte-level BPE", "llama": "SentencePiece BPE"}
NAMES = dict(bos_token="bos", eos_token="eos", unk_token="unknown", pad_token="padding")
# Names of control tokens that end an answer: a GGUF file names one end token where the published config names several.
ENDS = "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> <|end_of_text|> <eos> </s>"
HARMONY_END, HARMONY_RETURN = "<|end|>", "<|return|>"  # where both are tokens, <|end|> ends a message and not the answer
INFILL = (("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle"))  # new and old names of three roles
TEMPLATE_KEYS = {
    "chat_template.jinja": "tokenizer.chat_template",
    f"{TEMPLATES}/tool_use.jinja": "tokenizer.chat_template.tool_use",
}
SAMPLING = dict(temperature="temp", top_k="top_k", top_p="top_p", min_p="min_p", repetition_penalty="penalty_repeat")
KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's other added tokens drop the spaces after them


def tokenizer_files(metadata: dict[str, Any]) -> dict[str, str]:
    """Returns texts by file name: tokenizer.json, tokenizer_config.json, and what the file has of chat templates and sampling.

    A template for tools is a file of its own. End tokens and the sampling that the makers propose are generation_config.json.

    Args:
        metadata: the file's values by key; arrays are lists or numpy arrays.

    Raises:
        InputError: the tokenizer is of another kind than byte-level BPE and SentencePiece BPE, or its data are broken.
    """
    model = take(metadata, PREFIX + "model", str)
    if model not in MODELS:
        known = " and ".join(f"{name} ({words})" for name, words in MODELS.items())
        what = "the file's metadata has no" if model is None else f"{quoted(model)} is the file's"
        raise InputError(f"{what} {PREFIX}model: {known} are read; use the model's Hugging Face folder instead")
    vocabulary = read_vocabulary(metadata, sentencepiece=model == "llama")
    templates = {name: take(metadata, key, str) for name, key in TEMPLATE_KEYS.items()}
    with input_error_from("the file's tokenizer cannot be read"):
        tokenizer = (_byte_level if model == "gpt2" else _sentencepiece)(metadata, vocabulary)
        config = _config(vocabulary) | _infill(metadata, vocabulary)
        files = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(config)}
        files |= {name: template for name, template in templates.items() if template is not None}
        generation = _sampling(metadata) | ({"eos_token_id": ends} if (ends := _ends(vocabulary)) else {})
        if generation:
            files["generation_config.json"] = json.dumps(generation)
        for name, text in files.items():
            if (size := len(text.encode())) > MOST_BYTES:
                raise InputError(f"the file's {name} would have {size} bytes: expected at most {MOST_BYTES}")
    return files


def _byte_level(metadata: dict[str, Any], vocabulary: Vocabulary) -> Any:
    """Returns a tokenizer whose tokens are written in GPT-2's alphabet, a letter for each byte."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = take(metadata, PREFIX + "pre", str)
    if name is None:
        LOG.warning(
            "the file has no %spre: texts are cut into words by llama.cpp's default, perhaps not as the model's", PREFIX
        )
    rule = pre_tokenizer("default" if name is None else name)
    merges = written_merges(metadata, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=rule.whole_words))
    if rule.composes:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in rule.expressions]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, vocabulary)
    _add_ends(tokenizer, metadata, vocabulary, adds_bos=rule.adds_bos)
    return tokenizer


def _sentencepiece(metadata: dict[str, Any], vocabulary: Vocabulary) -> Any:
    """Returns a tokenizer with bytes for unknown characters and, where the file says so, a space in front of texts."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    has_merges = PREFIX + "merges" in metadata
    merges = written_merges(metadata, vocabulary) if has_merges else derived_merges(metadata, vocabulary)
    unknown = vocabulary.name("unknown")
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    to_text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if take(metadata, PREFIX + "add_space_prefix", bool, True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        to_text.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(to_text)
    is_phi3 = take(metadata, "general.architecture", str) == "phi3"
    _add_tokens(tokenizer, vocabulary, drop_spaces=is_phi3)
    _add_ends(tokenizer, metadata, vocabulary, adds_bos=True)
    return tokenizer


def _add_tokens(tokenizer: Any, vocabulary: Vocabulary, *, drop_spaces: bool = False) -> None:
    """Adds the tokens that are matched whole in a text: control tokens, which are special, and user-defined ones."""
    from tokenizers import AddedToken

    added = []
    for i in np.flatnonzero(vocabulary.is_control | (vocabulary.types == USER_DEFINED)):
        name, special = vocabulary.tokens[i], bool(vocabulary.is_control[i])
        drops = drop_spaces and name not in KEEP_SPACE
        added.append(AddedToken(name, normalized=False, special=special, rstrip=drops))
    tokenizer.add_tokens(added)


def _add_ends(tokenizer: Any, metadata: dict[str, Any], vocabulary: Vocabulary, *, adds_bos: bool) -> None:
    """Puts bos in front of a text and eos after it, where the file says so; `adds_bos`: also where it says nothing of bos."""
    from tokenizers import processors

    names, special = dict(bos="", eos=""), []
    for role in names:
        key = f"{PREFIX}add_{role}_token"
        adds = take(metadata, key, bool, role == "bos" and adds_bos and role in vocabulary.special)
        if adds and role not in vocabulary.special:
            raise InputError(f"{key} is true and the file has no {PREFIX}{role}_token_id: expected the token's id")
        if adds:
            names[role] = role
            special.append(dict(id=role, ids=[vocabulary.special[role]], tokens=[vocabulary.name(role)]))
    single, second = (f"{names['bos']} {text} {names['eos']}".split() for text in ("$A", "$B"))
    pair = single + [f"{piece}:1" for piece in second]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


def _config(vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns tokenizer_config.json; padding and unknown tokens that are words of a text are left out."""
    whole = vocabulary.is_control | (vocabulary.types == USER_DEFINED)
    special = vocabulary.special
    names = {name: vocabulary.name(role) for name, role in NAMES.items() if role in special and whole[special[role]]}
    config = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False)
    return config | names


def _infill(metadata: dict[str, Any], vocabulary: Vocabulary) -> dict[str, list[str]]:
    """Returns the field of tokenizer_config.json that `text.infill` reads; none where the file names no three tokens."""
    for roles in INFILL:
        ids = [token_id(metadata, role, len(vocabulary.tokens)) for role in roles]
        if None not in ids:
            return dict(fim_tokens=[vocabulary.tokens[i] for i in ids])
    return {}


def _sampling(metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of generation_config.json about sampling; none where the file proposes none."""
    fields = {}
    for name, key in SAMPLING.items():
        value = metadata.get(f"general.sampling.{key}")
        value = value.item() if isinstance(value, np.generic) else value
        if type(value) in (int, float) and math.isfinite(value):
            fields[name] = value
        elif value is not None:
            LOG.warning("general.sampling.%s is %s, not a number: not read", key, quoted(value))
    return {"do_sample": True} | fields if fields else {}


def _ends(vocabulary: Vocabulary) -> list[int]:
    """Returns the ids of the tokens that end an answer: those that the file names, and control tokens with names of `ENDS`."""
    ids, is_control = vocabulary.ids, vocabulary.is_control
    ends = [vocabulary.special[role] for role in ("eos", "eot", "eom") if role in vocabulary.special]
    ends += [ids[name] for name in ENDS.split() if name in ids and is_control[ids[name]]]
    inner = ids[HARMONY_END] if HARMONY_END in ids and HARMONY_RETURN in ids else None
    return [end for end in dict.fromkeys(ends) if end != inner]
