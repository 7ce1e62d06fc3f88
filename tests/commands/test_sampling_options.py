"""The options of sampling: penalties and biases as flags, and --sampling model, which takes generation_config.json's sampling."""

import io
import json
from types import SimpleNamespace

import pytest

import icejax
from icejax.cache.registry import Full
from icejax.commands import chat, options
from icejax.commands import generate as command
from tests.helpers.commands import run

OPTIONS = ["--json", "--cache", "full", "--max-new-tokens", "8", "--compile-cache", "none"]
PROPOSED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
PROMPT = "import os\n"


@pytest.fixture
def answer(bundled, capsys, monkeypatch, tmp_path):
    """Returns a function that answers a prompt with a generation_config.json; it returns token ids and stderr."""
    monkeypatch.setattr(command, "load", lambda *_: bundled)

    def answer(proposed, *flags):
        (tmp_path / "config.json").write_text("{}")
        if proposed is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(proposed))
        line = ["--model", str(tmp_path), "--prompt", PROMPT, *flags, *OPTIONS]
        status, out, err = run(capsys, *line)
        return (json.loads(out)["token_ids"] if status == 0 else None), err

    return answer


def expected(bundled, **sampling) -> list[int]:
    """Returns the token ids of an answer from Python."""
    options = dict(cache=Full(), max_new_tokens=8, sampling=icejax.Sampling(**sampling))
    return list(icejax.generate(*bundled, PROMPT, **options)[0].token_ids)


def test_flags_of_penalties_and_biases_reach_the_answer(answer, bundled):
    flags = ["--presence-penalty", "1.5", "--frequency-penalty", "-0.5", "--logit-bias", "97=3", "--logit-bias", "10=-100"]
    options = dict(presence_penalty=1.5, frequency_penalty=-0.5, logit_bias={97: 3, 10: -100})
    assert answer(None, *flags) == (expected(bundled, **options), "")
    assert expected(bundled, **options) != expected(bundled)


@pytest.mark.parametrize("parser", [options.parser, options.chat_parser])
def test_temp_is_another_name_of_temperature(parser):
    assert parser("x").parse_args(["--temp", "0.7"]).temperature == 0.7


CASES = {
    "taken": (PROPOSED, [], dict(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05), "temperature 0.6, top_k 20, top_p 0.95, repetition_penalty 1.05"),
    "overridden": (
        PROPOSED, ["--temperature", "1.5", "--top-k", "0", "--presence-penalty", "1"],
        dict(temperature=1.5, top_p=0.95, repetition_penalty=1.05, presence_penalty=1.0), "top_p 0.95, repetition_penalty 1.05",
    ),
    "no temperature": ({"do_sample": True, "min_p": 0.1}, [], dict(temperature=1.0, min_p=0.1), "temperature 1, min_p 0.1"),
    "greedy": (
        {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.2}, [],
        dict(repetition_penalty=1.2), "temperature 0, repetition_penalty 1.2; answers are greedy",
    ),
    "empty": ({}, [], {}, "temperature 0; answers are greedy"),
    "not said": ({"temperature": 0.6, "top_p": None, "eos_token_id": 2}, [], {}, "temperature 0; answers are greedy"),
}  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(x, marks=pytest.mark.slow if x == "no temperature" else ()) for x in CASES])
def test_the_models_sampling_is_taken_and_told(answer, bundled, case):
    proposed, flags, options, line = CASES[case]
    assert answer(proposed, "--sampling", "model", *flags) == (
        expected(bundled, **options),
        f"sampling of generation_config.json: {line}\n",
    )


def test_without_the_option_the_models_sampling_is_not_taken(answer, bundled):
    assert answer(PROPOSED) == (expected(bundled), "")


def test_sampling_that_is_not_supported_is_told_by_name(answer, bundled):
    proposed = {"do_sample": False, "no_repeat_ngram_size": 3, "typical_p": 1.0, "num_beams": 4, "guidance_scale": None}
    ids, err = answer(proposed, "--sampling", "model", "--quiet")
    assert (ids, err) == (
        expected(bundled),
        "icejax.generate: warning: generation_config.json: no_repeat_ngram_size, num_beams are not supported: no effect\n",
    )


def test_a_model_without_sampling_is_told(answer, bundled, tmp_path):
    ids, err = answer(None, "--sampling", "model")
    warning = f"icejax.generate: warning: {tmp_path} has no generation_config.json: no sampling options are read from it\n"
    assert (ids, err) == (expected(bundled), warning)


BAD = {
    "number": (dict(PROPOSED, temperature="hot"), ["--sampling", "model"], "generation_config.json: temperature must be a number from 0 to 1e+06, got 'hot': set it by an option"),
    "range": (dict(PROPOSED, top_p=2), ["--sampling", "model"], "generation_config.json: top_p must be a number above 0 and at most 1, got 2: set it by an option"),
    "do_sample": ({"do_sample": "yes"}, ["--sampling", "model"], "generation_config.json: 'do_sample' must be true or false, got 'yes'"),
    "choice": (PROPOSED, ["--sampling", "best"], "argument --sampling: invalid choice: 'best' (choose from"),
    "bias": (PROPOSED, ["--logit-bias", "97"], "--logit-bias must be ID=BIAS, a token id and a number, got '97'"),
    "bias no number": (PROPOSED, ["--logit-bias", "97=much"], "--logit-bias must be ID=BIAS, a token id and a number, got '97=much'"),
    "bias no id": (PROPOSED, ["--logit-bias", "a=1"], "a token id of logit_bias must be a whole number, got 'a'"),
    "bias range": (PROPOSED, ["--logit-bias", "97=inf"], "logit_bias of token 97 must be a number from -100 to 100, got inf"),
    "bias of another model": (PROPOSED, ["--logit-bias", "257=1"], "prompt 1: logit_bias has token 257 and the model knows 257: give token ids of this model"),
    "presence": (PROPOSED, ["--presence-penalty", "2.5"], "presence_penalty must be a number from -2 to 2, got 2.5"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_sampling_is_one_line(answer, case):
    proposed, flags, message = BAD[case]
    ids, err = answer(proposed, *flags)
    assert ids is None and message in err and err.count("\n") == 1 and err.startswith("icejax.generate: error: ")


def test_an_option_stands_in_for_a_value_out_of_range(answer, bundled):
    ids, _ = answer(dict(PROPOSED, top_p=0), "--sampling", "model", "--top-p", "0.5")
    assert ids == expected(bundled, temperature=0.6, top_k=20, top_p=0.5, repetition_penalty=1.05)


def test_python_takes_the_models_sampling_too(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(PROPOSED))
    sampling = icejax.model_sampling(tmp_path, top_k=0, frequency_penalty=0.5)
    assert sampling == icejax.Sampling(temperature=0.6, top_p=0.95, repetition_penalty=1.05, frequency_penalty=0.5)
    with pytest.raises(icejax.InputError, match="^no/such/folder: expected a checkpoint folder"):
        icejax.model_sampling("no/such/folder")
    with pytest.raises(icejax.InputError, match="^top_p must be a number above 0 and at most 1, got 3"):
        icejax.model_sampling(tmp_path, top_p=3)


def test_a_chat_takes_the_models_sampling(monkeypatch, capsys, tmp_path):
    """And tells it before the model is loaded."""
    (tmp_path / "generation_config.json").write_text(json.dumps(PROPOSED))
    answers = []

    def record(arguments, answer, *_, **__):
        answers.append(answer)
        return SimpleNamespace(context_length=10)

    monkeypatch.setattr(chat, "Chat", record)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert chat.main(["--model", str(tmp_path), "--sampling", "model", "--min-p", "0.1"]) == 0
    assert answers[0].sampling == icejax.Sampling(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05, min_p=0.1)
    assert capsys.readouterr().err.startswith("sampling of generation_config.json: temperature 0.6, top_k 20")
