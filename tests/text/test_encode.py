"""Names of control tokens in messages and prompts stay text. The reference is a twin of each tokenizer, whose names differ."""

import concurrent.futures
import copy
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icejax.text.chat_text import ChatText
from icejax.text.control_tokens import ControlTokens
from icejax.text.encode import encode, encode_apart, encode_behind
from tests.helpers import chat_templates
from tests.helpers.control_tokens import FILES, NAMES, in_twin, tokenizer, twin

PAIRS = {kind: (tokenizer(kind), twin(kind)) for kind in FILES}
WORDS = ["the", " he", "say", " ", "\n", "<", "</", "s>", "|user|>", "12", " x"]
NAMED = [*WORDS, *NAMES]
texts = st.lists(st.sampled_from(WORDS), max_size=6).map("".join).filter(lambda text: not any(name in text for name in NAMES))
contents = st.lists(st.sampled_from(NAMED), max_size=6).map("".join)


def ids_of(kind, text, **options):
    """Returns the token ids of the twin."""
    return PAIRS[kind][1](text, **dict(add_special_tokens=False) | options)["input_ids"]


@pytest.mark.parametrize("kind", FILES)
@given(pieces=st.lists(st.tuples(st.sampled_from(NAMES), texts), min_size=1, max_size=4), first=texts)
def test_pieces_have_the_tokens_of_the_whole_text(kind, pieces, first):
    text, tok = first + "".join(name + piece for name, piece in pieces), PAIRS[kind][0]
    assert encode_apart(tok, text, ControlTokens(tok).find(text)) == tok(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", FILES)
@given(message=contents, other=contents)
def test_names_in_messages_are_text(kind, message, other):
    chat = ChatText("<s><|user|>") + message + ChatText("</s>\n<|user|>") + other + ChatText("</s>")
    expected = ids_of(
        kind, f"{in_twin('<s><|user|>')}{message}{in_twin('</s>')}\n{in_twin('<|user|>')}{other}{in_twin('</s>')}"
    )
    assert encode(PAIRS[kind][0], chat) == expected


@pytest.mark.parametrize("kind", FILES)
@given(text=contents)
def test_names_in_plain_prompts_are_text_unless_asked_for(kind, text):
    tok = PAIRS[kind][0]
    assert encode(tok, text, special_tokens=True) == ids_of(kind, text, add_special_tokens=True)
    assert encode(tok, text) == ids_of(kind, text)
    assert encode(tok, text, parse_special=True) == tok(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", ["byte level", "llama-2", "mistral-0.3"])
@given(text=contents)
def test_names_behind_other_text_are_text(kind, text):
    chat = ChatText("</s><|user|>") + text
    expected = encode_behind(lambda part: ids_of(kind, part), in_twin("</s><|user|>") + text)
    assert encode(PAIRS[kind][0], chat, continues=True) == expected


@pytest.mark.parametrize("kind", FILES)
def test_a_text_has_one_bos(kind):
    tok = PAIRS[kind][0]
    chat = ChatText("<s><|user|>") + "the he" + ChatText("</s>")
    expected = tok(str(chat), add_special_tokens=False)["input_ids"]
    assert encode(tok, chat, special_tokens=True) == expected
    assert encode(tok, str(chat), special_tokens=True, parse_special=True) == expected
    assert expected.count(1) == 1 and tok(str(chat))["input_ids"] == [1, *expected]
    without = ChatText("<|user|>") + "the he"  # transformers adds none to a template that writes none
    assert encode(tok, without, special_tokens=True) == tok(str(without), add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("family", chat_templates.FAMILIES)
@given(text=st.text(max_size=20))
def test_ordinary_text_has_the_tokenizers_own_tokens(family, text):
    tok = chat_templates.tokenizer(family)
    assert encode(tok, text, special_tokens=True) == tok(text)["input_ids"]


def test_a_chat_keeps_its_spans_in_slices_and_sums():
    chat = "x" + ChatText("<s>") + "a</s>" + ChatText("</s>", [(1, 2)])
    assert (chat, chat.spans) == ("x<s>a</s></s>", ((0, 1), (4, 9), (10, 11)))
    assert (chat[5:], chat[5:].spans) == ("</s></s>", ((0, 4), (5, 6))) and chat[:4].spans == ((0, 1),)
    assert chat[-2:].spans == () and type(chat[::2]) is str and chat[0] == "x"
    with pytest.raises(TypeError):
        chat + 1


def test_unknown_text_is_no_control_token():
    tok = PAIRS["unigram"][0]
    assert ControlTokens(tok).ids == {"<unk>": 0, "<s>": 1, "</s>": 2, "<|user|>": 3}
    assert encode(tok, "the 日</s>日") == ids_of("unigram", "the 日</s>日") and ControlTokens(tok).count([0, 0, 1]) == 1
    assert encode(PAIRS["llama-2"][0], "a<unk>b", parse_special=True).count(0) == 1
    assert encode(PAIRS["llama-2"][0], "a<unk>b") == [
        token for piece in ("▁", *"a<unk>b") for token in PAIRS["llama-2"][0].convert_tokens_to_ids([piece])
    ]
    assert "<|user|>" in ControlTokens(PAIRS["not called special"][0]).ids
    assert ControlTokens(object()).ids == {} and ControlTokens(object()).find("<s>") == []


def test_the_longest_name_counts():
    tok = copy.deepcopy(PAIRS["byte level"][0])
    tok.add_special_tokens({"extra_special_tokens": ["</s>>", "<</s"]})
    controls = ControlTokens(tok)
    for text in ("</s>>", "</s></s>>", "<</s>", "he<</s</s>"):
        assert [name.token for name in controls.find(text)] == [
            token for token in tok(text, add_special_tokens=False)["input_ids"] if token in controls.ids.values()
        ]


def test_texts_of_many_threads_keep_their_control_tokens(monkeypatch):
    """A message with a control token's name needs another setting of the tokenizer than a template does."""
    whole, shared = ChatText("<|user|>say<|user|>"), tokenizer("byte level")
    named = ChatText("<|user|>say </s><|user|>", spans=((8, 16),))
    expected = [encode(shared, text) for text in (whole, named)]

    class Slow:
        """A backend between whose setting and encoding another thread may run."""

        def __init__(self, backend):
            self.__dict__["backend"] = backend

        def __getattr__(self, name):
            return getattr(self.backend, name)

        def __setattr__(self, name, value):
            setattr(self.backend, name, value)
            time.sleep(0.002)

    monkeypatch.setattr(shared, "_tokenizer", Slow(shared._tokenizer))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda i: encode(shared, (whole, named)[i % 2]), range(40)))
    assert answers == expected * 20
