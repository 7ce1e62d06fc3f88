"""A text between two others: the tokens of each form, in the order in which its models were trained."""

import pytest
from transformers import PreTrainedTokenizerFast

from icejax.checks.errors import InputError
from icejax.text import infill
from tests.helpers.small_tokenizers import byte_level, sentencepiece, write


@pytest.fixture
def tokenizer(tmp_path):
    """Returns a small tokenizer with further control tokens."""

    def make(file, names, **settings) -> PreTrainedTokenizerFast:
        write(tmp_path, file)
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", **settings)
        tokenizer.add_special_tokens({"additional_special_tokens": [*names]})
        return tokenizer

    return make


@pytest.mark.parametrize("form", infill.FORMS)
def test_texts_stand_behind_their_marks(tokenizer, form):
    known = tokenizer(byte_level(), form)
    first, second, middle = known.convert_tokens_to_ids(list(form))
    he, space_x = (known(text, add_special_tokens=False)["input_ids"] for text in ("he", " x"))
    assert infill.infill(known, "he", " x") == [first, *he, second, *space_x, middle]
    assert infill.infill(known, "", " x") == [first, second, *space_x, middle]


def test_names_of_marks_in_a_text_stay_text(tokenizer):
    known = tokenizer(byte_level(), infill.FORMS[1])
    marks = known.convert_tokens_to_ids(list(infill.FORMS[1]))
    ids = infill.infill(known, "a<fim_suffix>", "b")
    assert [token for token in ids if token in marks] == marks and known.decode(ids[1 : ids.index(marks[1])]) == "a<fim_suffix>"
    assert infill.infill(known, "a<fim_suffix>", "b", parse_special=True).count(marks[1]) == 2


def test_the_second_text_gets_no_space_in_front(tokenizer):
    known = tokenizer(sentencepiece(legacy=True), infill.FORMS[4])
    tokens = known.convert_ids_to_tokens(infill.infill(known, "he", "he"))
    assert tokens == ["▁<PRE>", "▁he", "▁<SUF>", "he", "▁<MID>"]


def test_a_bos_stands_in_front_and_ends_are_named(tokenizer):
    from tokenizers.processors import TemplateProcessing

    known = tokenizer(byte_level(), [*infill.FORMS[0], "<|file_sep|>"])
    known.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert infill.infill(known, "he", "x")[:2] == [1, known.convert_tokens_to_ids("<|fim_prefix|>")]
    assert infill.infill_ends(known) == ("<|file_sep|>",)
    assert infill.infill_ends(tokenizer(byte_level(), ["▁<EOT>"])) == ("▁<EOT>", " <EOT>")


def test_a_form_of_the_settings_goes_first_and_a_model_without_is_refused(tokenizer):
    own = tokenizer(byte_level(), infill.FORMS[0], fim_tokens=["<|user|>", "<s>", "</s>"])
    assert infill.infill_form(own) == tuple(own.convert_tokens_to_ids(["<|user|>", "<s>", "</s>"]))
    plain = tokenizer(byte_level(), [])
    assert infill.infill_form(plain) is None
    with pytest.raises(InputError, match="the model has no tokens for a text between two others: leave suffix out"):
        infill.infill(plain, "a", "b")
