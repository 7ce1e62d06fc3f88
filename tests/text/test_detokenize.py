"""Streaming detokenization: whole characters, no part of a stop string, and the same text as decoding at once."""

from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from icejax.api.generate import ASSETS
from icejax.checks.errors import InputError
from icejax.text.detokenize import UNFINISHED, Detokenizer, decoded
from icejax.text.token_text import token_text
from icejax.text.tokenizer import load_tokenizer
from tests.helpers import small_tokenizers


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ASSETS)


@given(text=st.text(max_size=30))
def test_pieces_join_to_the_text(tokenizer, text):
    ids = tokenizer(text)["input_ids"] if text else []
    stream = Detokenizer(tokenizer)
    pieces = [stream.add(token) for token in ids]
    assert "".join(pieces) + stream.rest() == tokenizer.decode(ids, skip_special_tokens=True)


def test_characters_come_whole(tokenizer):
    stream = Detokenizer(tokenizer)
    assert [stream.add(token) for token in "é日".encode()] == ["", "é", "", "", "日"]


def test_unfinished_character_is_told_at_the_end(tokenizer):
    stream = Detokenizer(tokenizer)
    assert stream.add("é".encode()[0]) == ""
    assert stream.rest() == "\N{REPLACEMENT CHARACTER}"


def test_bytes_that_are_no_text_are_told_as_they_come(tokenizer):
    """A valid character among the invalid bytes still comes whole."""
    ids = [255] * 40 + [*"日".encode()] + [255] * 40 + [*"é".encode()]
    stream = Detokenizer(tokenizer)
    lengths, pieces = [], []
    decode = stream._decode
    stream._decode = lambda end: lengths.append(len(stream._tokens[stream._start : end])) or decode(end)
    for token in ids:
        pieces.append(stream.add(token))
    assert "".join(pieces) + stream.rest() == tokenizer.decode(ids) and "日" in "".join(pieces)
    assert max(lengths) < 40 and any(pieces[:20])


def test_a_tokenizer_that_fails_or_gives_no_unicode_is_told():
    with pytest.raises(InputError, match=r"^the tokenizer fails: chr\(\) arg not in range"):
        decoded(SimpleNamespace(decode=lambda tokens: "".join(map(chr, tokens))), [0x110000])
    assert decoded(SimpleNamespace(decode=lambda tokens: "a\ud800b"), [0]) == "a?b"


def test_stop_string_is_held_back_and_cut(tokenizer):
    stream = Detokenizer(tokenizer, ["END", "halt"])
    pieces = []
    for token in b"an EN ENDING":
        pieces.append(stream.add(token))
        if stream.stopped:
            break
    assert "".join(pieces) == "an EN " and stream.rest() == ""
    assert "E" not in "".join(pieces[:4])  # E may begin END


def test_what_only_looked_like_a_stop_string_is_released(tokenizer):
    stream = Detokenizer(tokenizer, ["END"])
    assert "".join(stream.add(token) for token in b"the EN") == "the "
    assert stream.rest() == "EN"


def test_special_tokens_are_not_text(tokenizer):
    stream = Detokenizer(tokenizer)
    assert stream.add(ord("a")) + stream.add(tokenizer.eos_token_id) + stream.rest() == "a"


def test_a_space_behind_a_special_token_stays():
    """With a decoder that drops the first space of a text, like SentencePiece's."""
    words = {"<unk>": 0, "\u2581Hello": 1, "\u2581world": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<tool>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend)
    stream, ids = Detokenizer(fast), [1, 3, 3, 2, 3, 1]
    assert [stream.add(token) for token in ids] == ["Hello", "", "", " world", "", " Hello"]
    assert fast.decode(ids, skip_special_tokens=True) == "Hello world Hello"


def test_a_tokenizer_need_not_know_its_special_tokens():
    """As in transformers' MistralCommonBackend, where `added_tokens_decoder` is not implemented."""
    letters = SimpleNamespace(decode=lambda tokens, **_: "".join(map(chr, tokens)), added_tokens_decoder=lambda: 1 / 0)
    assert "".join(map(Detokenizer(letters).add, b"ab")) == "ab"


def test_a_stop_string_may_be_a_special_token(tokenizer):
    """A special token also ends a partial match of a stop string."""
    name, token_id = tokenizer.eos_token, tokenizer.eos_token_id
    stream = Detokenizer(tokenizer, ["END", name])
    assert "".join(map(stream.add, b"an E")) == "an " and not stream.stopped
    assert stream.add(token_id) == "E" and stream.stopped and stream.rest() == ""
    stream = Detokenizer(tokenizer, ["END"])
    assert "".join(map(stream.add, [*b"an E", token_id, *b"ND"])) == "an END" and not stream.stopped
    with pytest.raises(
        InputError, match=f"^stop string '{name}.n' holds the special token '{name}', which is no text: give it"
    ):
        Detokenizer(tokenizer, [f"{name}\n"])


@pytest.fixture(scope="module", params=["llama-2", "mistral-0.3"])
def sentencepiece(request, tmp_path_factory):
    file = small_tokenizers.sentencepiece(legacy=request.param == "llama-2")
    return load_tokenizer(small_tokenizers.write(tmp_path_factory.mktemp("model"), file))


@given(text=st.text(alphabet="the ca\n日🦜", min_size=1, max_size=20), place=st.integers(1, 60))
def test_text_is_what_the_tokens_add_to_the_prompts(sentencepiece, text, place):
    """The reference decodes prompt and answer together; a prompt ends with a complete character."""
    ids = sentencepiece(text)["input_ids"]
    before, after = sentencepiece.decode(ids[:place]), sentencepiece.decode(ids)
    if UNFINISHED not in before:
        stream = Detokenizer(sentencepiece, before=ids[:place])
        assert "".join(map(stream.add, ids[place:])) + stream.rest() == after[len(before) :]


def test_an_answer_keeps_its_leading_space(sentencepiece):
    ids = sentencepiece.convert_tokens_to_ids(["<s>", "\u2581the", "\u2581cat", "<|user|>", "\u2581he"])
    for prompt, expected in ((ids[:1], "he"), (ids[:2], " he"), (ids[:4], " he"), ([*ids[:2], 200], "he")):
        stream = Detokenizer(sentencepiece, before=prompt)
        assert stream.add(ids[4]) == expected, prompt


def test_a_token_is_told_with_its_space_and_its_bytes(sentencepiece, tokenizer):
    def told(tokenizer, name):
        return token_text(tokenizer, tokenizer.convert_tokens_to_ids(name))

    assert [told(sentencepiece, name) for name in ("\u2581he", "he", "\u2581\u2581")] == [
        (" he", b" he"),
        ("he", b"he"),
        ("  ", b"  "),
    ]
    assert [told(sentencepiece, name) for name in ("<0x0A>", "</s>")] == [("\n", b"\n"), ("</s>", b"</s>")]
    assert told(sentencepiece, "<0xE6>") == (UNFINISHED, b"\xe6")
    assert [token_text(tokenizer, byte) for byte in "é".encode()] == [(UNFINISHED, b"\xc3"), (UNFINISHED, b"\xa9")]


def test_bytes_of_every_byte_level_token(tmp_path):
    tokenizer = load_tokenizer(small_tokenizers.write(tmp_path / "model", small_tokenizers.byte_level()))
    ids = tokenizer("naïve 日🦜\x00\xad\N{REPLACEMENT CHARACTER}" + "".join(map(chr, range(256))))["input_ids"]
    assert b"".join(token_text(tokenizer, token)[1] for token in ids).decode() == tokenizer.decode(ids)
