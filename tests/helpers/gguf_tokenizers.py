"""Small tokenizers as the metadata of a GGUF file has them: a byte-level one, and one that SentencePiece trains."""

import argparse
import functools
import io
from pathlib import Path

import sentencepiece

from tests.helpers import small_tokenizers

PROSE = Path(argparse.__file__).read_text()  # English and code
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
ROLES = dict(bos="<s>", eos="</s>", unknown="<unk>")


def _metadata(model: str, tokens: list[str], types: list[int], **values) -> dict:
    ids = {f"{role}_token_id": tokens.index(name) for role, name in ROLES.items()}
    values = dict(model=model, tokens=tokens, token_type=types) | ids | values
    metadata = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    return metadata | {"general.architecture": "llama", "tokenizer.chat_template": small_tokenizers.TEMPLATE}


def byte_level(pre: str = "qwen2", words: tuple[str, ...] = ()) -> dict:
    """Returns the metadata of a byte-level tokenizer with <think> as a user-defined token.

    Args:
        words: words of GPT-2's alphabet that are tokens beside a few others.
    """
    model = small_tokenizers.byte_level(words)["model"]
    tokens = [*model["vocab"], "<think>"]
    types = [NORMAL] * len(model["vocab"]) + [USER_DEFINED]
    types[: len(small_tokenizers.SPECIAL)] = [UNKNOWN] + [CONTROL] * (len(small_tokenizers.SPECIAL) - 1)
    return _metadata("gpt2", tokens, types, pre=pre, merges=list(model["merges"]))


@functools.cache
def _trained(prefix: bool) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in PROSE.splitlines() if line]),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<think>", *("\u2581" * n for n in range(2, 6))],
        control_symbols=["<|user|>"],
        minloglevel=2,
    )
    return model.getvalue()


def sentencepiece_model(*, prefix: bool = True) -> sentencepiece.SentencePieceProcessor:
    """Returns a small SentencePiece model; `prefix`: it puts a space in front of a text."""
    return sentencepiece.SentencePieceProcessor(model_proto=_trained(prefix))


def sentencepiece_bpe(*, prefix: bool = True) -> dict:
    """Returns the model's metadata as llama.cpp's converter writes it: user-defined spaces as spaces, with a score of -1000."""
    model = sentencepiece_model(prefix=prefix)
    tokens, types, scores = [], [], []
    for i in range(model.vocab_size()):
        is_bytes, is_control, is_unknown = model.is_byte(i), model.is_control(i), model.is_unknown(i)
        types.append(BYTE if is_bytes else CONTROL if is_control else UNKNOWN if is_unknown else NORMAL)
        tokens.append(model.id_to_piece(i))
        scores.append(model.get_score(i))
        if tokens[-1] == "<think>" or (len(tokens[-1]) > 1 and set(tokens[-1]) == {"\u2581"}):
            types[-1], tokens[-1], scores[-1] = USER_DEFINED, tokens[-1].replace("\u2581", " "), -1000.0
    return _metadata("llama", tokens, types, scores=scores, add_space_prefix=prefix)
