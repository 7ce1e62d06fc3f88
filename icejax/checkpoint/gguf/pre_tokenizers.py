"""The pre-tokenizers that GGUF files name: regular expressions that cut a text into words. `tokenizer_files` calls it.

The expressions are those of the models' published tokenizer.json files and, where these are not known, of llama.cpp. A rule's
expressions apply one after another: each cuts the pieces of the one before at its matches, and text between matches is a piece.
Example: "smollm" cuts "ab 12" at digits to "ab ", "1", "2", and then at words to "ab", " ", "1", "2".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from icejax.checks.errors import InputError, quoted, suggestion

# No expression may backtrack without bound: no repeat is inside another repeat.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{MARKS}|{SPACES}"
QWEN2 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{MARKS}|{SPACES}"
QWEN35 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
UPPER_LOWER = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
TEKKEN = rf"{UPPER_LOWER[0]}|{UPPER_LOWER[1]}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
GPT4O = (
    rf"{UPPER_LOWER[0]}{CONTRACTIONS}?|{UPPER_LOWER[1]}{CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
)
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
SEED = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + SPACES,
)
# The published file lists the cased letters one by one; of some rare scripts it has none.
DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"(?<!\s)\s+$",
    ASIAN,
    r"\p{N}+",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", ASIAN, r"\p{N}")
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level vocabulary's texts are cut before merging.

    Attributes:
        expressions: regular expressions, applied one after another.
        whole_words: whether a word that is a token stays whole, without merges.
        adds_bos: whether bos stands in front of a text where the file does not say so.
        composes: whether characters are composed first (Unicode's form NFC), as the published files do and llama.cpp does not.
    """

    expressions: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    composes: bool = False


def _rules() -> dict[str, PreTokenizer]:
    digits = PreTokenizer((r"\p{N}", GPT2))
    qwen = PreTokenizer((QWEN2,))
    llama3 = PreTokenizer((LLAMA3,))
    table = {
        "default": PreTokenizer(DEFAULT),
        "falcon": PreTokenizer(FALCON),
        "gpt-2 phi-2 exaone4 gigachat a.x-4.0 mellum jais trillion granite-docling": PreTokenizer((GPT2,)),
        "olmo mpt": PreTokenizer((GPT2,), composes=True),
        "smollm starcoder refact codeshell exaone minerva-7b mellum2": digits,
        "command-r": replace(digits, composes=True),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": replace(llama3, whole_words=True, adds_bos=True),
        "dbrx smaug-bpe glm4 chatglm-bpe": llama3,
        "qwen2 deepseek-r1-qwen megrez": replace(qwen, composes=True),
        "stablelm2 kormo hunyuan solar-open grok-2": qwen,
        "qwen35": PreTokenizer((QWEN35,), composes=True),
        "tekken": PreTokenizer((TEKKEN,), whole_words=True, adds_bos=True),
        "gpt-4o llama4 kanana2 minimax-m2": PreTokenizer((GPT4O,), whole_words=True),
        "deepseek-llm": PreTokenizer(DEEPSEEK_LLM),
        "deepseek-coder": PreTokenizer(DEEPSEEK_CODER),
        "deepseek-v3 hunyuan-dense joyai-llm": PreTokenizer(DEEPSEEK_V3),
        "bailingmoe bailingmoe2 llada-moe": PreTokenizer((BAILING,)),
        "seed-coder": PreTokenizer((SEED,)),
    }
    return {name: rule for names, rule in table.items() for name in names.split()}


RULES = _rules()


def pre_tokenizer(name: str) -> PreTokenizer:
    """Returns the rule that `tokenizer.ggml.pre` names; InputError for a name that is not known."""
    if name not in RULES:
        known = ", ".join(sorted(RULES))
        raise InputError(f"tokenizer.ggml.pre is {quoted(name)}{suggestion(name, RULES)}: expected one of {known}")
    return RULES[name]
