"""Answers and sessions with SentencePiece tokenizers: spaces stay where they are, and none is added."""

import dataclasses
import json

import pytest

import icejax
from icejax.cache.registry import Full
from icejax.session.session import Session
from icejax.text.tokenizer import load_tokenizer
from tests.helpers import families, small_tokenizers

WORDS = ("\u2581the", "\u2581he", "he", "\u2581cat")


@pytest.fixture(scope="module", params=["llama-2", "mistral-0.3"])
def loaded(request, tmp_path_factory):
    """A tiny model that answers with words, and a tokenizer."""
    import torch

    file = small_tokenizers.sentencepiece(legacy=request.param == "llama-2")
    vocabulary = file["model"]["vocab"]
    model = families.build(families.row("llama-gqa"), vocab_size=len(vocabulary))
    words = torch.zeros(len(vocabulary), 1)
    words[[vocabulary[word] for word in WORDS]] = 8.0
    model.lm_head.weight.data *= words
    folder = families.save(model, tmp_path_factory.mktemp("model"))
    return icejax.checkpoint.load_model(folder), load_tokenizer(
        small_tokenizers.write(tmp_path_factory.mktemp("tokenizer"), file)
    )


def test_a_text_is_what_follows_the_prompt(loaded):
    """Against transformers' text of prompt and answer together."""
    tokenizer = loaded[1]
    prompts = ["the cat", "def f(x):\n    return", "(", "日"]
    responses = icejax.generate(*loaded, prompts, cache=Full(), max_new_tokens=4)
    for prompt, response in zip(prompts, responses, strict=True):
        assert tokenizer.decode([*tokenizer(prompt)["input_ids"], *response.token_ids]) == prompt + response.text
    assert any(response.text.startswith(" ") for response in responses)


def test_a_session_reads_as_one_text(loaded):
    session = Session(*loaded, cache=Full(), context_length=200)
    texts = ["the cat", "he", " the", "\nhe"]
    spoken = "".join(text + session.ask(text, max_new_tokens=3).text for text in texts)
    assert loaded[1].decode(session.token_ids) == spoken


def test_the_next_turn_of_a_chat_gains_no_space(loaded, monkeypatch):
    monkeypatch.setattr(
        loaded[1], "chat_template", "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
    )
    session = Session(*loaded, cache=Full(), context_length=200)
    answers = [session.chat(text, max_new_tokens=3).text for text in ("the cat", "he")]
    expected = f"user:the cat\nassistant:{answers[0]}\nuser:he\nassistant:{answers[1]}"
    assert loaded[1].decode(session.token_ids) == expected


def test_log_probabilities_tell_a_space_and_give_bytes(loaded):
    (response,) = icejax.generate(*loaded, "the cat", cache=Full(), max_new_tokens=1, logprobs=len(loaded[1]))
    told = {entry.token_id: entry for entry in response.logprobs[0].top}
    ids = loaded[1].convert_tokens_to_ids(["\u2581he", "he", "<0xE6>"])
    assert [told[token].text for token in ids] == [" he", "he", "\N{REPLACEMENT CHARACTER}"]
    assert [told[token].bytes for token in ids] == [tuple(b" he"), tuple(b"he"), (0xE6,)]
    line = json.loads(json.dumps(dataclasses.asdict(response)["logprobs"][0]["chosen"]))
    assert bytes(line["bytes"]).decode() == line["text"] == response.text
