"""A text behind other text gains no space, and tokenizers that add none give the same token ids as before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icejax.text.encode import encode_behind
from icejax.text.tokenizer import load_tokenizer
from tests.helpers import small_tokenizers

FILES = {
    "llama-2": small_tokenizers.sentencepiece(legacy=True),
    "mistral-0.3": small_tokenizers.sentencepiece(legacy=False),
    "gpt-2": small_tokenizers.byte_level(),
}


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    loaded = {name: load_tokenizer(small_tokenizers.write(tmp_path_factory.mktemp("model"), FILES[name])) for name in FILES}
    return loaded, {
        name: lambda text, tok=tok: tok(text, add_special_tokens=False)["input_ids"] for name, tok in loaded.items()
    }


@pytest.mark.parametrize("name", ["llama-2", "mistral-0.3"])
@given(text=st.text(alphabet="the |\n日", min_size=1, max_size=12))
def test_later_text_gains_no_space(encoders, name, text):
    """The reference is the text of both together, less the text of the first."""
    tokenizers, encode = encoders[0], encoders[1][name]
    before = encode("the cat")
    ids = encode_behind(encode, text)
    assert tokenizers[name].decode(before + ids) == "the cat" + text


def test_later_text_has_the_tokens_of_the_middle_of_a_text(encoders):
    tokenizers, encoders = encoders
    for name, text, expected in (
        ("llama-2", "he", ["he"]),
        ("llama-2", " he", ["\u2581he"]),
        ("llama-2", "\nhe", ["<0x0A>", "he"]),
        ("llama-2", "</s><|user|>he", ["</s>", "<|user|>", "\u2581he"]),
        ("mistral-0.3", "</s><|user|>he", ["</s>", "<|user|>", "he"]),
        ("gpt-2", "he", ["he"]),
        ("gpt-2", "\nhe", ["\u010a", "he"]),
    ):
        assert tokenizers[name].convert_ids_to_tokens(encode_behind(encoders[name], text)) == expected, (name, text)


@given(text=st.text(min_size=1, max_size=12))
def test_a_tokenizer_that_adds_nothing_is_left_alone(encoders, text):
    encode = encoders[1]["gpt-2"]
    assert encode_behind(encode, text) == encode(text)


def test_a_border_that_merges_with_the_text_is_not_used():
    """With a token for two line breaks, the second border decides; with tokens for both, the text stays as it is."""

    def encode(text, merged=("\n\n",)):
        pieces = "\u2581" + text.replace(" ", "\u2581")
        for pair in merged:
            pieces = pieces.replace(pair, "2" if pair == "\n\n" else "3")
        return [*pieces]

    assert encode_behind(encode, "\nx") == ["\n", "x"]
    assert encode_behind(lambda text: encode(text, ("\n\n", "|\n")), "\nx") == ["\u2581", "\n", "x"]
