"""Small tokenizers of all kinds for tests of control tokens, each with a twin whose control tokens have other names."""

from __future__ import annotations

import json

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.helpers import small_tokenizers

NAMES = ("<s>", "</s>", "<|user|>")
BOS = dict(
    type="TemplateProcessing",
    single=[dict(SpecialToken=dict(id="<s>", type_id=0)), dict(Sequence=dict(id="A", type_id=0))],
    pair=[],
    special_tokens={"<s>": dict(id="<s>", ids=[1], tokens=["<s>"])},
)
# In the twins control tokens have these names, which no test writes into a message.
TWINS = dict(zip(NAMES, ("\u2460one\u2460", "\u2460two\u2460", "\u2460three\u2460"), strict=True))


def _unigram() -> dict:
    """Returns a tokenizer.json of a Unigram model, whose vocabulary has the control tokens' names at no cost."""
    letters = ["\n", *map(chr, range(33, 127))]
    words = [(piece, -3.0) for piece in ("\u2581the", "\u2581he", "he", "say", "\u2581")] + [
        (letter, -5.0) for letter in letters
    ]
    file = small_tokenizers.sentencepiece(legacy=False)
    vocabulary = [[name, 0.0] for name in small_tokenizers.SPECIAL] + [list(word) for word in words]
    return file | dict(model=dict(type="Unigram", unk_id=0, vocab=vocabulary, byte_fallback=False))


def _with_flags(file: dict, **flags: bool) -> dict:
    return file | dict(added_tokens=[token | flags for token in file["added_tokens"]])


def _not_special(file: dict, name: str) -> dict:
    return file | dict(added_tokens=[token | dict(special=token["content"] != name) for token in file["added_tokens"]])


def _prefixed(file: dict) -> dict:
    return file | dict(pre_tokenizer=file["pre_tokenizer"] | dict(add_prefix_space=True))


FILES = {
    "byte level": small_tokenizers.byte_level(),
    "byte level with a space": _prefixed(small_tokenizers.byte_level()),
    "llama-2": small_tokenizers.sentencepiece(legacy=True),
    "mistral-0.3": small_tokenizers.sentencepiece(legacy=False),
    "unigram": _unigram(),
    "not called special": _not_special(small_tokenizers.byte_level(), "<|user|>"),
    "spaces dropped behind": _with_flags(small_tokenizers.byte_level(), rstrip=True),
    "spaces dropped before": _with_flags(small_tokenizers.sentencepiece(legacy=True), lstrip=True),
}


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer, which puts <s> before every text."""
    return _loaded(json.dumps(FILES[kind] | dict(post_processor=BOS)), NAMES)


def twin(kind: str) -> PreTrainedTokenizerFast:
    """Returns the tokenizer with other names for its control tokens: their old names are text to it."""
    text = json.dumps(FILES[kind] | dict(post_processor=BOS))
    for name, other in TWINS.items():
        text = text.replace(json.dumps(name), json.dumps(other))
    return _loaded(text, tuple(TWINS.values()))


def _loaded(text: str, names: tuple[str, ...]) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(text)
    tokens = dict(bos_token=names[0], eos_token=names[1], unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=small_tokenizers.TEMPLATE, **tokens)


def in_twin(text: str) -> str:
    """Returns a text with the names that control tokens have in the twin."""
    for name, other in TWINS.items():
        text = text.replace(name, other)
    return text
