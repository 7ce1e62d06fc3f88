"""The tokenizer in a GGUF file's metadata gives the token ids of transformers and of SentencePiece, and its files load."""

import collections
import json
import logging
import math

import numpy as np
import pytest
import tokenizers

from icejax.checkpoint.generation_config import end_tokens, proposed_sampling
from icejax.checkpoint.gguf import merges, vocabulary
from icejax.checkpoint.gguf import tokenizer_files as files
from icejax.checkpoint.gguf.pre_tokenizers import RULES
from icejax.checkpoint.gguf.tokenizer_files import tokenizer_files
from icejax.checks.errors import InputError
from icejax.text.chat_template import render
from icejax.text.infill import infill_form
from icejax.text.tokenizer import load_tokenizer
from tests.helpers import gguf_tokenizers
from tests.helpers.gguf_tokenizers import CONTROL, NORMAL, PROSE

KEY = "tokenizer.ggml."
TEXTS = (
    "",
    " ",
    "Each policy is a file, and the tests of each are a row.",
    "def f(n):\n    return n\n\n\nclass A:\n\tpass\n",
    "12345 67 3.14",
    "It's, they'LL, IT'S",
    "中文 日本語 🙂 na\u00efve \u0410",
    "  two spaces   three     five       seven",
    "tabs\t\tand\r\nlines \n \n end  ",
    "a<think>b</think> <|user|>he</s>",
    "{}[]()<>!?;:_-=+*/\\|`~@#$%^&",
)


def words_of_prose() -> tuple[str, ...]:
    counts = collections.Counter(PROSE.split())
    return tuple("\u0120" + word for word, n in counts.most_common(200) if word.isascii())


def tokenizer_of(metadata: dict) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"])


def ids(tokenizer, text: str, **options) -> list[int]:
    return tokenizer.encode(text, **{"add_special_tokens": False} | options).ids


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "qwen35", "llama-bpe", "tekken", "gpt-4o"])
def test_byte_level_ids_are_those_of_transformers(pre):
    """transformers takes the words; that words which are tokens need no merges, as in the published files, it does not know."""
    gguf = pytest.importorskip("transformers.integrations.gguf")
    metadata = gguf_tokenizers.byte_level(pre, words_of_prose())
    names = dict(tokens="tokens", merges="merges", token_type="token_type", pre_tokenizer_type="pre", tokenizer_type="model")
    theirs, _ = gguf.convert_gguf_tokenizer("qwen2", {name: metadata[KEY + key] for name, key in names.items()})
    theirs.model.ignore_merges = pre in ("llama-bpe", "tekken", "gpt-4o")
    ours = tokenizer_of(metadata)
    for text in TEXTS:
        assert ids(ours, text) == ids(theirs, text), text
        assert ours.decode(ids(ours, text), skip_special_tokens=False) == text
    assert ids(ours, TEXTS[2]) == ids(tokenizer_of(metadata | {KEY + "tokens": np.array(metadata[KEY + "tokens"])}), TEXTS[2])


# The words of "It'LL cost 12345 uSD,ab\n\n  x=中文!\n e\u0301s", which llama.cpp merges in; § stands for a line break.
CUTS = {
    "default": "It|'|LL| cost| |123|45| uSD|,|ab|§§ | x|=|中文|!|§| e|\u0301|s",
    "falcon": "It|'|LL| cost| |123|45| uSD|,|ab|§§ | x|=|中文|!|§| e|\u0301|s",
    "phi-2": "It|'|LL| cost| 12345| uSD|,|ab|§§ | x|=|中文|!|§| e|\u0301|s",
    "smollm": "It|'|LL| cost| |1|2|3|4|5| uSD|,|ab|§§ | x|=|中文|!|§| e|\u0301|s",
    "llama3": "It|'LL| cost| |123|45| uSD|,ab|§§| | x|=中文|!§| e|\u0301s",
    "qwen2": "It|'LL| cost| |1|2|3|4|5| uSD|,ab|§§| | x|=中文|!§| \u00e9s",
    "stablelm2": "It|'LL| cost| |1|2|3|4|5| uSD|,ab|§§| | x|=中文|!§| e|\u0301s",
    "qwen35": "It|'LL| cost| |1|2|3|4|5| uSD|,ab|§§| | x|=中文|!§| \u00e9s",
    "tekken": "It|'LL| cost| |1|2|3|4|5| u|SD|,ab|§§| | x|=中文|!§| e\u0301s",
    "gpt-4o": "It'LL| cost| |123|45| u|SD|,ab|§§| | x|=中文|!§| e\u0301s",
    "deepseek-llm": "It|'|LL| cost| |12345| uSD|,|ab|§|§| | x|=|中文|!|§| e|\u0301|s",
    "deepseek-coder": "It|'|LL| cost| |1|2|3|4|5| uSD|,|ab|§|§| | x|=|中文|!|§| e|\u0301|s",
    "deepseek-v3": "It|'LL| cost| |123|45| uSD|,ab|§§| | x|=|中文|!§| e\u0301s",
    "bailingmoe": "It|'LL| cost| |1|2|3|4|5| uSD|,ab|§§| | x|=中文|!§| e|\u0301s",
    "seed-coder": "It|'LL| cost| |1|2|3|4|5| uSD|,ab|§§| | x|=中文|!|§| e|\u0301s",
}


@pytest.mark.parametrize("pre", CUTS)
def test_text_is_cut_by_the_rule_that_the_file_names(pre):
    tokenizer = tokenizer_of(gguf_tokenizers.byte_level(pre))
    text = "It'LL cost 12345 uSD,ab\n\n  x=中文!\n e\u0301s"
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    letters = tokenizers.decoders.ByteLevel()
    words = [letters.decode([word]) for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert "|".join(words).replace("\n", "§") == CUTS[pre]


def test_every_rule_has_its_words():
    assert set(RULES.values()) <= {RULES[pre] for pre in [*CUTS, "llama3", "dbrx", "command-r", "olmo"]}


def test_whole_words_need_no_merges():
    for pre, expected in (("llama3", ["hello"]), ("dbrx", ["he", "l", "l", "o"])):
        metadata = gguf_tokenizers.byte_level(pre)
        metadata |= {
            KEY + "tokens": [*metadata[KEY + "tokens"], "hello"],
            KEY + "token_type": [*metadata[KEY + "token_type"], 1],
        }
        assert tokenizer_of(metadata).encode("hello", add_special_tokens=False).tokens == expected


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_are_those_of_sentencepiece(prefix):
    model = gguf_tokenizers.sentencepiece_model(prefix=prefix)
    tokenizer = tokenizer_of(gguf_tokenizers.sentencepiece_bpe(prefix=prefix))
    texts = [text for text in TEXTS if "</s>" not in text]  # SentencePiece reads no control tokens in a text
    for text in texts if prefix else [*texts, "a<think>b</think> he"]:
        assert ids(tokenizer, text) == model.encode(text), text
        assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text


def test_spaces_behind_added_tokens_are_llama_cpps():
    with_prefix, without = (tokenizer_of(gguf_tokenizers.sentencepiece_bpe(prefix=prefix)) for prefix in (True, False))
    pieces = with_prefix.encode("he<think>he<|user|> he", add_special_tokens=False).tokens
    assert "".join(pieces) == "\u2581he<think>\u2581he<|user|>\u2581\u2581he"
    assert "".join(without.encode("he<think> he", add_special_tokens=False).tokens) == "he<think>\u2581he"


def test_phi3_drops_spaces_behind_its_added_tokens():
    tokenizer = tokenizer_of(gguf_tokenizers.sentencepiece_bpe() | {"general.architecture": "phi3"})
    pieces = [tokenizer.id_to_token(token) for token in ids(tokenizer, "<|user|> \n he<s> he")]
    assert "".join(pieces) == "<|user|>\u2581he<s>\u2581\u2581he"


def test_equal_scores_leave_the_order_to_the_ids():
    metadata = gguf_tokenizers.sentencepiece_bpe()
    expected = tokenizer_files(metadata)
    assert tokenizer_files(metadata | {KEY + "scores": [-1000.0] * len(metadata[KEY + "tokens"])}) == expected
    del metadata[KEY + "scores"]
    assert tokenizer_files(metadata) == expected


@pytest.mark.parametrize("metadata", [gguf_tokenizers.byte_level(), gguf_tokenizers.sentencepiece_bpe()])
def test_a_folder_of_the_files_is_read_like_a_published_one(tmp_path, metadata):
    metadata |= {f"{KEY}fim_{role}_token_id": i for role, i in (("pre", 3), ("suf", 1), ("mid", 2))}
    metadata |= {KEY + "add_bos_token": np.True_, KEY + "add_eos_token": True, KEY + "eot_token_id": np.uint32(3)}
    files = tokenizer_files(metadata)
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="llama")))
    tokenizer, backend = load_tokenizer(tmp_path), tokenizer_of(metadata)
    for text in TEXTS:
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids(backend, text)
        assert tokenizer(text)["input_ids"] == [1, *ids(backend, text), 2]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert tokenizer.pad_token is None and infill_form(tokenizer) == (3, 1, 2)
    messages = [dict(role="user", content="he"), dict(role="assistant", content="the")]
    assert str(render(tokenizer, [*messages, messages[0]])) == "<s><|user|>he\nthe</s><|user|>he\n"
    assert end_tokens(tmp_path) == (2, 3)
    special = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    assert {"<unk>": True, "<s>": True, "</s>": True, "<|user|>": True, "<think>": False}.items() <= special.items()


def test_bos_stands_in_front_where_the_file_says_nothing():
    assert ids(tokenizer_of(gguf_tokenizers.sentencepiece_bpe()), "", add_special_tokens=True) == [1]
    for pre, expected in (("llama-bpe", [1]), ("tekken", [1]), ("qwen2", []), ("gpt-4o", [])):
        assert ids(tokenizer_of(gguf_tokenizers.byte_level(pre)), "", add_special_tokens=True) == expected
    without = gguf_tokenizers.sentencepiece_bpe() | {KEY + "add_bos_token": False}
    assert ids(tokenizer_of(without), "", add_special_tokens=True) == []
    nameless = gguf_tokenizers.byte_level("llama-bpe") | {KEY + "bos_token_id": 2**32 - 1}
    assert ids(tokenizer_of(nameless), "", add_special_tokens=True) == []


def test_control_tokens_end_an_answer_by_their_names():
    def ends(*names, **roles):
        metadata = gguf_tokenizers.byte_level()
        first = len(metadata[KEY + "tokens"])
        metadata[KEY + "tokens"] += [*names, "<|im_end|>"]
        metadata[KEY + "token_type"] += [CONTROL] * len(names) + [NORMAL]
        metadata |= {f"{KEY}{role}_token_id": metadata[KEY + "tokens"].index(name) for role, name in roles.items()}
        return [token - first for token in json.loads(tokenizer_files(metadata)["generation_config.json"])["eos_token_id"]]

    assert ends("<|end|>", "<|call|>", eos="<|call|>")[:2] == [1, 0]
    assert ends("<|end|>", "<|return|>", "<|call|>", eos="<|return|>")[:2] == [1, 2]
    assert 3 not in ends("<|end|>", "<|return|>", "<|call|>", eos="<|return|>")
    assert ends("<|eot_id|>", "<|eom_id|>", eos="<|im_end|>", eot="<|eot_id|>", eom="<|eom_id|>")[:3] == [2, 0, 1]


@pytest.mark.parametrize("roles", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")])
def test_tokens_that_fill_in_are_those_of_the_file(roles):
    metadata = gguf_tokenizers.byte_level()
    assert "fim_tokens" not in json.loads(tokenizer_files(metadata)["tokenizer_config.json"])
    metadata |= {f"{KEY}{role}_token_id": i for role, i in zip(roles, (3, 1, 2), strict=True)}
    assert json.loads(tokenizer_files(metadata)["tokenizer_config.json"])["fim_tokens"] == ["<|user|>", "<s>", "</s>"]


def test_padding_that_is_a_word_is_left_out():
    metadata = gguf_tokenizers.byte_level()
    for name, expected in (("h", None), ("<|user|>", "<|user|>")):
        metadata[KEY + "padding_token_id"] = metadata[KEY + "tokens"].index(name)
        assert json.loads(tokenizer_files(metadata)["tokenizer_config.json"]).get("pad_token") == expected


def test_roles_are_sentencepieces_where_the_file_names_none():
    metadata = gguf_tokenizers.sentencepiece_bpe()
    expected = tokenizer_files(metadata)
    for role in ("bos", "eos", "unknown"):
        del metadata[f"{KEY}{role}_token_id"]
    assert tokenizer_files(metadata) == expected


def test_a_missing_rule_is_told(caplog):
    caplog.set_level(logging.WARNING, logger="icejax")
    metadata = gguf_tokenizers.byte_level("default")
    expected = tokenizer_files(metadata)
    del metadata[KEY + "pre"]
    assert tokenizer_files(metadata) == expected
    assert caplog.messages == [
        "the file has no tokenizer.ggml.pre: texts are cut into words by llama.cpp's default, perhaps not as the model's"
    ]


BPE, SPM = gguf_tokenizers.byte_level(), gguf_tokenizers.sentencepiece_bpe()
COUNT, SPM_COUNT = len(BPE[KEY + "tokens"]), len(SPM[KEY + "tokens"])
MISSING = object()


def changed(name: str, *entries: tuple[int, object]) -> list:
    values = list((BPE if name != "scores" else SPM)[KEY + name])
    for i, value in entries:
        values[i] = value
    return values


REFUSED = [
    (BPE, "model", MISSING, "the file's metadata has no tokenizer.ggml.model: gpt2 (byte-level BPE) and llama (SentencePiece BPE) are read; use the model's Hugging Face folder instead"),
    (BPE, "model", "bert", "'bert' is the file's tokenizer.ggml.model: gpt2 (byte-level BPE) and llama (SentencePiece BPE) are read; use the model's Hugging Face folder instead"),
    (BPE, "model", "gemma4", "'gemma4' is the file's tokenizer.ggml.model: gpt2 (byte-level BPE) and llama"),
    (BPE, "model", 3, "tokenizer.ggml.model must be a text, found 3"),
    (BPE, "pre", "qwen_2", "tokenizer.ggml.pre is 'qwen_2' (did you mean qwen2?): expected one of a.x-4.0, bailingmoe, "),
    (BPE, "pre", ["qwen2"], "tokenizer.ggml.pre must be a text, found ['qwen2']"),
    (BPE, "tokens", MISSING, "the file's metadata has no tokenizer.ggml.tokens: expected the tokenizer's tokens"),
    (BPE, "tokens", [], "tokenizer.ggml.tokens is empty: expected the tokenizer's tokens"),
    (BPE, "tokens", "abc", "tokenizer.ggml.tokens must be a list, found 'abc'"),
    (BPE, "tokens", np.zeros((2, 2)), "tokenizer.ggml.tokens must be a list, found array("),
    (BPE, "tokens", np.array("a"), "tokenizer.ggml.tokens must be a list, found array('a', dtype='<U1')"),
    (BPE, "tokens", changed("tokens", (5, b"x")), "tokenizer.ggml.tokens: entry 5 is b'x': expected a text"),
    (BPE, "tokens", np.arange(COUNT), "tokenizer.ggml.tokens: entry 0 is 0: expected a text"),
    (BPE, "tokens", changed("tokens", (9, "<s>")), "tokenizer.ggml.tokens: 1 and 9 are both '<s>': expected different tokens"),
    (BPE, "tokens", changed("tokens", (-1, "\ud800")), f"tokenizer.ggml.tokens: entry {COUNT - 1} is '\\ud800': expected a text"),
    (BPE, "token_type", [1, 2], f"tokenizer.ggml.token_type has 2 entries and tokenizer.ggml.tokens has {COUNT}: expected one for each token"),
    (BPE, "token_type", np.ones(COUNT), "tokenizer.ggml.token_type must be whole numbers, found [1.0, 1.0, 1.0, 1.0]"),
    (BPE, "token_type", changed("token_type", (0, [1])), "tokenizer.ggml.token_type: expected numbers: "),
    (BPE, "token_type", 3, "tokenizer.ggml.token_type must be a list, found 3"),
    (BPE, "merges", MISSING, "the file's metadata has no tokenizer.ggml.merges: expected the tokenizer's merges"),
    (BPE, "merges", changed("merges", (1, "he")), "tokenizer.ggml.merges: entry 1 is 'he': expected two tokens with a space between them"),
    (BPE, "merges", changed("merges", (1, "h zz")), "tokenizer.ggml.merges: entry 1, 'h zz', needs the token 'zz', which is missing"),
    (BPE, "merges", changed("merges", (1, "h h")), "tokenizer.ggml.merges: entry 1, 'h h', needs the token 'hh', which is missing"),
    (BPE, "merges", changed("merges", (0, 7)), "tokenizer.ggml.merges: entry 0 is 7: expected a text"),
    (BPE, "eos_token_id", COUNT, f"tokenizer.ggml.eos_token_id is {COUNT}: expected the id of one of the {COUNT} tokens"),
    (BPE, "padding_token_id", -2, f"tokenizer.ggml.padding_token_id is -2: expected the id of one of the {COUNT} tokens"),
    (BPE, "bos_token_id", "<s>", "tokenizer.ggml.bos_token_id must be a whole number, found '<s>'"),
    (BPE, "bos_token_id", True, "tokenizer.ggml.bos_token_id must be a whole number, found True"),
    (BPE, "add_bos_token", 1, "tokenizer.ggml.add_bos_token must be true or false, found 1"),
    (BPE | {KEY + "eos_token_id": -1}, "add_eos_token", True, "tokenizer.ggml.add_eos_token is true and the file has no tokenizer.ggml.eos_token_id: expected the token's id"),
    (SPM, "scores", [0.0], f"tokenizer.ggml.scores has 1 entries and tokenizer.ggml.tokens has {SPM_COUNT}: expected one for each token"),
    (SPM, "scores", changed("scores", (300, float("nan"))), "tokenizer.ggml.scores must be numbers, found [0.0, 0.0, 0.0, 0.0]"),
    (SPM, "scores", ["0"] * SPM_COUNT, "tokenizer.ggml.scores must be numbers, found ['0', '0', '0', '0']"),
    (SPM, "add_space_prefix", "yes", "tokenizer.ggml.add_space_prefix must be true or false, found 'yes'"),
    ({KEY + "model": "llama"}, "tokens", ["ab" * 20_000], "tokenizer.ggml.tokens are too long to derive merges from: 1600000000 steps, expected at most 1073741824"),
]  # fmt: skip


@pytest.mark.parametrize("metadata, name, value, message", REFUSED, ids=range(len(REFUSED)))
def test_broken_data_are_refused_in_a_line(metadata, name, value, message):
    metadata = {key: data for key, data in metadata.items() if key != KEY + name}
    if value is not MISSING:
        metadata[KEY + name] = value
    with pytest.raises(InputError) as error:
        tokenizer_files(metadata)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_template_that_is_no_text_is_refused():
    with pytest.raises(InputError, match=r"^tokenizer.chat_template must be a text, found \[\]$"):
        tokenizer_files(BPE | {"tokenizer.chat_template": []})


def test_a_template_is_stored_and_never_run():
    template = "{% for i in range(10**12) %}{{ ''.__class__ }}{% endfor %}"
    assert tokenizer_files(BPE | {"tokenizer.chat_template": template})["chat_template.jinja"] == template
    assert "chat_template.jinja" not in tokenizer_files({key: BPE[key] for key in BPE if key != "tokenizer.chat_template"})


def test_a_template_for_tools_is_taken_where_there_are_tools(tmp_path):
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "with {{ tools[0].name }}"}
    for name, text in tokenizer_files(BPE | templates).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer, chat = load_tokenizer(tmp_path), [dict(role="user", content="a")]
    assert render(tokenizer, chat) == "plain" and render(tokenizer, chat, dict(tools=[dict(name="f")])) == "with f"


def test_the_sampling_that_a_file_proposes_is_read(tmp_path, caplog):
    values = dict(temp=0.7, top_k=np.int32(20), top_p=0.8, min_p=math.nan, penalty_repeat="1.1", mirostat=2)
    files = tokenizer_files(BPE | {f"general.sampling.{key}": value for key, value in values.items()})
    (tmp_path / "generation_config.json").write_text(files["generation_config.json"])
    assert proposed_sampling(tmp_path) == dict(temperature=0.7, top_k=20, top_p=0.8) and end_tokens(tmp_path)
    assert "general.sampling.min_p is nan, not a number: not read" in caplog.messages
    assert "general.sampling.penalty_repeat is '1.1', not a number: not read" in caplog.messages


def test_sizes_are_bounded(monkeypatch):
    runs = {KEY + "model": "llama", KEY + "tokens": ["a" * n for n in range(1, 801)]}
    with pytest.raises(InputError, match="^tokenizer.ggml.tokens: their merges have more than 104857600 bytes: expected"):
        tokenizer_files(runs)
    monkeypatch.setattr(vocabulary, "MOST_TOKENS", 10)
    with pytest.raises(InputError, match=f"^tokenizer.ggml.tokens has {COUNT} entries: expected at most 10$"):
        tokenizer_files(BPE)
    monkeypatch.undo()
    monkeypatch.setattr(merges, "MOST_MERGES", 1)
    with pytest.raises(InputError, match="^tokenizer.ggml.merges has .* entries: expected at most 1$"):
        tokenizer_files(BPE)
    monkeypatch.undo()
    monkeypatch.setattr(vocabulary, "MOST_BYTES", 10)
    with pytest.raises(InputError, match=r"^tokenizer.ggml.tokens has \d+ characters: expected at most 10$"):
        tokenizer_files(BPE)
    monkeypatch.undo()
    monkeypatch.setattr(files, "MOST_BYTES", 100)
    with pytest.raises(InputError, match=r"^the file's tokenizer.json would have \d+ bytes: expected at most 100$"):
        tokenizer_files(BPE)
