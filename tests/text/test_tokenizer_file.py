"""A folder's tokenizer.json decides the token ids, whichever class transformers reads it by."""

import logging
from types import SimpleNamespace

import pytest
import tokenizers
import transformers

from icejax.text.chat_template import render
from icejax.text.tokenizer import load_tokenizer
from tests.helpers import small_tokenizers

TEXTS = (
    "hello world",
    " x",
    "def f(n):\n    return n",
    "1212 and 12",
    "\n\nhe",
    "I'm  here\t x",
    "na\u0308ve 中 🙂",
    "a</s> x<|user|>he",
)
FILES = {
    "byte level": small_tokenizers.byte_level(),
    "sentencepiece": small_tokenizers.sentencepiece(legacy=True),
    "sentencepiece, later form": small_tokenizers.sentencepiece(legacy=False),
}
CLASSES = [
    ("qwen2", "Qwen2Tokenizer"),
    ("qwen2", None),
    ("llama", "LlamaTokenizer"),
    ("llama", None),
    ("deepseek_v3", "LlamaTokenizerFast"),
    ("kimi_k2", "LlamaTokenizerFast"),
    ("gemma3_text", "GemmaTokenizer"),
    ("olmo3", "GPT2Tokenizer"),
    ("mistral", "LlamaTokenizer"),
]


@pytest.mark.parametrize("kind, name", CLASSES)
@pytest.mark.parametrize("file", FILES)
def test_token_ids_are_the_files(tmp_path, file, kind, name):
    folder = small_tokenizers.write(tmp_path / "model", FILES[file], model_type=kind, tokenizer_class=name)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    for text in TEXTS:
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == backend.encode(text, add_special_tokens=False).ids, (
            text
        )


def test_the_log_tells_that_the_file_is_used(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="icejax")
    load_tokenizer(small_tokenizers.write(tmp_path / "plain", FILES["byte level"]))
    assert caplog.messages == []
    load_tokenizer(small_tokenizers.write(tmp_path / "model", FILES["byte level"], tokenizer_class="Qwen2Tokenizer"))
    assert caplog.messages == ["Qwen2Tokenizer reads text otherwise than the folder's tokenizer file, which is used"]


def test_a_class_that_agrees_with_the_file_is_kept(tmp_path):
    step = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    regex = transformers.models.qwen2.tokenization_qwen2.PRETOKENIZE_REGEX
    split = dict(type="Split", pattern=dict(Regex=regex), behavior="Isolated", invert=False)
    file = FILES["byte level"] | dict(
        normalizer=dict(type="NFC"), pre_tokenizer=dict(type="Sequence", pretokenizers=[split, step])
    )
    folder = small_tokenizers.write(tmp_path / "model", file, model_type="qwen2", tokenizer_class="Qwen2Tokenizer")
    assert type(load_tokenizer(folder)) is transformers.Qwen2Tokenizer


def test_added_tokens_stay_tokens_beside_mistral_common(tmp_path, monkeypatch):
    """The package's tokenizer has no chat template and reads control tokens as text; transformers prefers it."""
    folder = small_tokenizers.write(tmp_path / "model", FILES["byte level"], model_type="mistral")
    other = SimpleNamespace(vocab_files_names={}, chat_template=None)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: other)
    tokenizer = load_tokenizer(folder)
    text = render(tokenizer, [dict(role="user", content="he")])
    assert text == "<s><|user|>he\n"
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == ["<s>", "<|user|>", "he", "\u010a"]


def test_a_file_that_multiplies_text_is_refused_before_use(tmp_path):
    """The class leaves the file's normalizer out; the file must not be tried before its growth is known."""
    step = dict(type="Replace", pattern=dict(String="h"), content="h" * 100)
    file = FILES["byte level"] | dict(normalizer=dict(type="Sequence", normalizers=9 * [step]))
    folder = small_tokenizers.write(tmp_path / "model", file, tokenizer_class="Qwen2Tokenizer")
    with pytest.raises(ValueError, match=r"the tokenizer may lengthen a text 1e\+18 times: [^\n]*$"):
        load_tokenizer(folder)
