"""Published GGUF files: token ids equal llama.cpp's, and those of the libraries that the models' own tokenizers use."""

import hashlib
import json
import random
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import Qwen2Tokenizer

from icejax.checkpoint.generation_config import end_tokens
from icejax.checkpoint.gguf.tokenizer_files import tokenizer_files
from icejax.text.tokenizer import load_tokenizer
from tests.helpers.gguf_tokenizers import CONTROL

KEY = "tokenizer.ggml."
ROOT = Path(__file__).parents[3]
PUBLISHED = Path("~/.cache/icejax/published").expanduser()  # bench.published fetches them
# File, its model type, ids of the tokens that end an answer, and the SHA-256 of llama.cpp's token ids of `texts`.
SMOL = ("SmolLM2-135M-Instruct.Q4_1.gguf", "llama", (2, 0), "fdd74e30639c6685fb70810e1e92df703404d027a1f62326e044a14066f2ff7d")
QWEN = (
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "qwen2",
    (151645, 151643),
    "e3687c1e5523f04d0c0bbcf45525347cf54767d7641c9ac08033c152e18a9274",
)
GEMMA = (
    "gemma-3-270m-q4_k_m.gguf",
    "gemma3_text",
    (1, 106),
    "9716d8e2d34baf31cf6a148f7a632ade75247b58f3c88a5a5365374fac715ebf",
)
PIECES = (
    *(
        " the",
        " of",
        "foo",
        "12",
        "999",
        " ",
        "  ",
        "\n",
        "\t",
        "\u00e9",
        "\u4e2d",
        "\U0001f642",
        "'s",
        "_",
        "(",
        ")",
        ";",
        "A",
    ),
    *("Zz", "<|im_end|>", "<think>", "\u00df", "\u0663", "\u0964", "."),
)
LINES = (
    *("", " ", "  ", "\n", "\n\n\n", "\t\t", "a", " a", "a ", "Hello, world! I'm here; they'll've gone.", "IT'S DON'T WE'LL"),
    *(
        "1234567890",
        "3.14159 2,000,000 12",
        "x1y22z333 4444",
        "\uff10\uff11 \u00bd \u00b2 \u2167",
        "\u4e2d\u6587\uff0c\u597d\u3002",
    ),
    *(
        "\u65e5\u672c\u8a9e\u306e\u30c6\u30b9\u30c8",
        "\ud55c\uad6d\uc5b4",
        "\u0627\u0644\u0639\u0631\u0628\u064a\u0629",
        "\u0e44\u0e17\u0e22",
    ),
    *(
        "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
        "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!",
    ),
    *(
        "def f(n):\n    return n * 2\n\n\nclass A:\n\tdef g(self): pass\n",
        "     five",
        "a    b     c",
        "tail   ",
        "\r\n\r\nwin\r\n",
    ),
    *(
        "a\u00a0b\u2003c\u3000d",
        "\u200b\u200d",
        "\x00\x01\x7f",
        "<|im_start|>user\nhi<|im_end|>\n",
        "<bos>x<eos>",
        "<table><tr>1",
    ),
    *(
        "camelCaseHTTPServer snake_case_name",
        "!!!??? ... --- === /// \\\\\\",
        "$100 + 5% = {a: [1, 2]} `x`~|^",
        "https://a.b/c?d=e#f",
    ),
    *(
        "a" * 44,
        "-" * 70,
        " " * 40 + "x",
        "\n" * 40,
        "\t" * 35 + "y",
        " \n \n \t\n x",
        "don\u2019t \u2026\u2014",
        "\U0001d518 \ufb01 \u03a9",
    ),
)


def texts() -> list[str]:
    """Returns texts of composed characters, on which llama.cpp and the published tokenizers agree."""
    rng = random.Random(3)
    mixed = ["".join(rng.choices(PIECES, k=rng.randint(2, 25))) for _ in range(200)]
    return [*LINES, *mixed, (ROOT / "LICENSE").read_text()[:4000]]


def metadata_of(file: str) -> dict:
    gguf = pytest.importorskip("gguf")
    if not (PUBLISHED / file).exists():
        pytest.skip(f"no {file}: python -m bench.published fetches it")
    return {key: field.contents() for key, field in gguf.GGUFReader(PUBLISHED / file).fields.items()}


def tokenizer_of(folder: Path, metadata: dict, kind: str):
    for name, text in tokenizer_files(metadata).items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(dict(model_type=kind)))
    return load_tokenizer(folder)


def merges_of(metadata: dict) -> tuple[dict[str, int], list[tuple[str, ...]]]:
    tokens = {token: i for i, token in enumerate(metadata[KEY + "tokens"])}
    return tokens, [tuple(merge.split(" ")) for merge in metadata[KEY + "merges"]]


def added_of(metadata: dict) -> list[AddedToken]:
    pairs = zip(metadata[KEY + "tokens"], metadata[KEY + "token_type"], strict=True)
    return [AddedToken(token, special=True, normalized=False) for token, kind in pairs if kind == CONTROL]


def smollm(metadata: dict):
    """Returns SmolLM2's tokenizer: GPT-2's, with every digit a word."""
    tokenizer = Tokenizer(models.BPE(*merges_of(metadata)))
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.add_special_tokens(added_of(metadata))
    return lambda text: tokenizer.encode(text).ids


def qwen(metadata: dict):
    tokenizer = Qwen2Tokenizer(*merges_of(metadata))
    tokenizer.add_tokens(added_of(metadata), special_tokens=True)
    return lambda text: tokenizer(text)["input_ids"]


def gemma(metadata: dict):
    """Returns Gemma's tokenizer as SentencePiece reads it: a model of the file's tokens, scores and types."""
    model = sentencepiece_model_pb2.ModelProto()
    columns = (metadata[KEY + name] for name in ("tokens", "scores", "token_type"))
    for token, score, kind in zip(*columns, strict=True):
        model.pieces.add(piece=token.replace(" ", "\u2581"), score=score, type=kind)
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = model.trainer_spec.BPE, True
    model.normalizer_spec.add_dummy_prefix = model.normalizer_spec.remove_extra_whitespaces = False
    processor = SentencePieceProcessor(model_proto=model.SerializeToString())
    return lambda text: None if "<bos>" in text else processor.encode(text)  # SentencePiece reads no control tokens in a text


@pytest.mark.slow
@pytest.mark.parametrize("published, reference", [(SMOL, smollm), (QWEN, qwen), (GEMMA, gemma)], ids=["smol", "qwen", "gemma"])
def test_published_token_ids(tmp_path, published, reference):
    file, kind, ends, digest = published
    metadata = metadata_of(file)
    tokenizer, theirs = tokenizer_of(tmp_path, metadata, kind), reference(metadata)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts()]
    for text, tokens in zip(texts(), ids, strict=True):
        expected = theirs(text)
        assert expected is None or tokens == expected, text
        assert tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == text
    assert hashlib.sha256(json.dumps(ids).encode()).hexdigest() == digest
    assert end_tokens(tmp_path) == ends
    assert len(tokenizer) == len(metadata[KEY + "tokens"])
    assert getattr(tokenizer, "chat_template", None) == metadata.get("tokenizer.chat_template")


@pytest.mark.slow
def test_qwen_composes_characters(tmp_path):
    metadata = metadata_of(QWEN[0])
    tokenizer = tokenizer_of(tmp_path, metadata, "qwen2")
    assert tokenizer("nai\u0308ve")["input_ids"] == qwen(metadata)("na\u00efve") == tokenizer("na\u00efve")["input_ids"]
