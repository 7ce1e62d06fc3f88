"""The end of a turn: the tokenizer's eos and the template's own end mark count beside the config's eos ids."""

import shutil

import pytest

import icejax
from icejax.api.generate import ASSETS
from icejax.cache.registry import Full
from icejax.session.session import Session
from icejax.text.turn_end import end_ids
from tests.helpers import chat_templates, families
from tests.text.test_reasoning import HARMONY, harmony  # noqa: F401

MARKS = {
    "behind the answer": ("{% for m in messages %}<u>{{ m.content }}<unused>{% endfor %}<u>", ["<unused>"]),
    "behind a line": ("{% for m in messages %}<u>{{ m.content | trim }}\n <unused>{% endfor %}", ["<unused>"]),
    "the next turn's mark": ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", ["<|im_start|>"]),
    "text": ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}<unused>", []),
    "no answer": ("{{ messages[0].content }}<unused>", []),
    "refuses": ("{{ raise_exception('no') }}", []),
    "none": (None, []),
}


@pytest.mark.parametrize("case", MARKS)
def test_the_templates_end_mark_is_the_token_behind(case, monkeypatch):
    tokenizer = chat_templates.tokenizer("qwen2.5")
    template, names = MARKS[case]
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert end_ids(tokenizer) == tuple(tokenizer.convert_tokens_to_ids(["<|im_end|>", *names]))


@pytest.mark.parametrize("family", chat_templates.FAMILIES)
def test_published_templates_end_with_their_eos(family):
    tokenizer = chat_templates.tokenizer(family)
    assert end_ids(tokenizer) == (tokenizer.eos_token_id,)


def test_the_end_of_a_harmony_message_ends_no_turn(harmony):  # noqa: F811
    assert "<|end|>" in HARMONY and end_ids(harmony) == (harmony.convert_tokens_to_ids("<|return|>"),)


@pytest.fixture(scope="module")
def fine_tune(tmp_path_factory):
    """The bundled model with another eos in its config: only its template ends answers with <eos>."""
    folder = tmp_path_factory.mktemp("model") / "tuned"
    shutil.copytree(ASSETS, folder)
    families.remove_eos(folder)
    families.edit_config(folder, eos_token_id=7)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<eos>{% endfor %}")
    return folder


def test_a_fine_tune_with_its_base_models_eos_stops(fine_tune, bundled, tmp_path):
    model, tokenizer = icejax.load(fine_tune)
    assert tokenizer.eos_token is None and model.config.eos_token_ids == (7, 256)
    session = Session(model, tokenizer, cache=Full(), context_length=200)
    session.chat("import", max_new_tokens=2)
    session.save(tmp_path / "kept")
    (fine_tune / "chat_template.jinja").unlink()  # the eos ids of a saved session may differ: they change no cached number
    bare = icejax.load(fine_tune)
    assert bare[0].config.eos_token_ids == (7,)
    bare[1].chat_template = tokenizer.chat_template
    assert Session.load(tmp_path / "kept", *bare).messages == session.messages
