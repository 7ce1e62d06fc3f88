"""Small tokenizers as a tokenizer.json has them: a byte-level one, and the two forms of SentencePiece."""

import json
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel

SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|user|>' + m['content'] + '\n' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)


def _bpe(first: list[str], words: list[str], **options) -> dict:
    """Returns a BPE model that merges each word from its front; earlier words come first."""
    pieces = {piece: None for piece in first} | {letter: None for word in words for letter in word}
    pieces |= {word[:end]: None for word in words for end in range(2, len(word) + 1)}
    merges = {f"{word[: end - 1]} {word[end - 1]}": None for word in words for end in range(2, len(word) + 1)}
    return dict(type="BPE", vocab={piece: i for i, piece in enumerate(pieces)}, merges=[*merges], **options)


def _file(model: dict, **steps) -> dict:
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    added = [dict(id=model["vocab"][name], content=name, **flags) for name in SPECIAL]
    return dict(version="1.0", truncation=None, padding=None, added_tokens=added, post_processor=None, model=model) | steps


def byte_level(words: tuple[str, ...] = ()) -> dict:
    """Returns a tokenizer.json that keeps numbers and line breaks together, as GPT-2's expression does and Qwen2's does not.

    Args:
        words: more words that are tokens.
    """
    words = ["12", "\u0120x", "\u010a\u010a", "he", "\u0120he", *words]
    model = _bpe([*SPECIAL, *sorted(ByteLevel.alphabet())], words)
    step = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    return _file(model, normalizer=None, pre_tokenizer=step, decoder=step)


def sentencepiece(*, legacy: bool) -> dict:
    """Returns a tokenizer.json with bytes for unknown characters and a space in front of texts.

    Args:
        legacy: whether special tokens are followed by a space too, as Llama-2's are and Mistral v0.3's are not.
    """
    bytes_of_text = [f"<0x{i:02X}>" for i in range(256)]
    letters = [chr(code) for code in range(33, 127)]
    words = ["\u2581the", "\u2581he", "he", "\u2581cat", "\u2581\u2581"]
    model = _bpe([*SPECIAL, *bytes_of_text, *letters], words, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    space = dict(type="Replace", pattern=dict(String=" "), content="\u2581")
    prepend = dict(type="Sequence", normalizers=[dict(type="Prepend", prepend="\u2581"), space])
    first = dict(type="Metaspace", replacement="\u2581", prepend_scheme="first", split=False)
    decoders = [
        dict(type="Replace", pattern=dict(String="\u2581"), content=" "),
        dict(type="ByteFallback"),
        dict(type="Fuse"),
        dict(type="Strip", content=" ", start=1, stop=0),
    ]
    forms = dict(normalizer=prepend, pre_tokenizer=None) if legacy else dict(normalizer=None, pre_tokenizer=first)
    return _file(model, **forms, decoder=dict(type="Sequence", decoders=decoders))


def write(folder: Path, file: dict, **settings) -> Path:
    """Writes a tokenizer.json, the settings of tokenizer_config.json and a config.json of a model type to a folder."""
    folder.mkdir(exist_ok=True)
    settings = dict(model_type="llama", tokenizer_class="PreTrainedTokenizerFast") | settings
    (folder / "config.json").write_text(json.dumps(dict(model_type=settings.pop("model_type"))))
    (folder / "tokenizer.json").write_text(json.dumps(file))
    names = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps(names | settings))
    return folder
