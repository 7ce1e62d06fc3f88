"""A whole GGUF file, with its tokenizer and chat template: text and sessions are those of a Hugging Face folder of the same."""

import json

import pytest

import icejax
from icejax.checkpoint.folder import resolve
from icejax.checkpoint.gguf.tokenizer_files import tokenizer_files
from icejax.commands import generate
from tests.helpers import families, gguf_files, gguf_tokenizers

KINDS = {"byte-level": gguf_tokenizers.byte_level, "sentencepiece": gguf_tokenizers.sentencepiece_bpe}


@pytest.fixture(params=KINDS)
def both(request, tmp_path):
    """A GGUF file, and a Hugging Face folder with its weights and tokenizer."""
    vocabulary = KINDS[request.param]()
    size, end = len(vocabulary["tokenizer.ggml.tokens"]), vocabulary["tokenizer.ggml.eos_token_id"]
    theirs = families.build(families.row("llama-gqa"), vocab_size=size, eos_token_id=end)
    file = gguf_files.write(theirs, tmp_path / "model.gguf", "Q8_0", vocabulary=vocabulary)
    families.save(theirs, tmp_path / "folder")
    families.edit_config(tmp_path / "folder", dtype="bfloat16")  # as files of codes say; a session compares it
    for name, text in tokenizer_files(vocabulary).items():
        (tmp_path / "folder" / name).write_text(text)
    return file, tmp_path / "folder"


def test_tokens_template_and_ends_are_those_of_a_folder(both):
    (ours, tokenizer), (theirs, reference) = map(icejax.load, both)
    messages = [{"role": "user", "content": "What is an argument?"}]
    for text in ("", " What is an argument?", "ä\n 12", tokenizer.apply_chat_template(messages, tokenize=False)):
        assert tokenizer.encode(text) == reference.encode(text)
    assert tokenizer.chat_template == reference.chat_template and ours.config == theirs.config and ours.config.eos_token_ids


def test_an_answer_follows_a_schema(both):
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": ["ä b", "é"]}, "b": {"maximum": 99, "minimum": 1, "type": "integer"}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    request = icejax.Request(prompt="argument", grammar=icejax.Grammar.json_schema(schema), max_new_tokens=100)
    [answer] = icejax.generate(*icejax.load(both[0]), request, cache=icejax.Full())
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), schema)


@pytest.mark.slow
def test_answers_and_sessions_are_those_of_a_folder(both, tmp_path):
    prompt = "What is an argument, and what is it for?"
    texts = []
    for number, source in enumerate(both):
        model, tokenizer = icejax.load(source)
        session = icejax.Session(model, tokenizer, cache=icejax.Full(), context_length=512)
        texts += [[icejax.generate(model, tokenizer, prompt, max_new_tokens=12)[0].text]]
        texts[-1] += [session.chat("What is it?", max_new_tokens=8).text]
        session.save(tmp_path / f"session{number}")
        again = icejax.Session.load(
            tmp_path / f"session{number}", model, tokenizer
        )  # weights in codes have a fingerprint of their own
        texts[-1] += [again.chat("And then?", max_new_tokens=8).text]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_the_command_takes_a_file(both, capsys):
    outputs = []
    for source in map(str, both):
        assert generate.main(["-m", source, "-p", "argument", "-n", "6", "--json"]) == 0
        outputs.append(json.loads(capsys.readouterr().out)["text"])
    assert outputs[0] == outputs[1]


def test_a_broken_vocabulary_is_one_line(tmp_path):
    vocabulary = gguf_tokenizers.byte_level() | {"tokenizer.ggml.model": "wordpiece"}
    theirs = families.build(families.row("llama-gqa"), vocab_size=len(vocabulary["tokenizer.ggml.tokens"]))
    with pytest.raises(icejax.InputError, match="'wordpiece' is the file's tokenizer.ggml.model"):
        resolve(gguf_files.write(theirs, tmp_path / "model.gguf", vocabulary=vocabulary))
