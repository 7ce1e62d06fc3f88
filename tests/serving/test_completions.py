"""`/v1/completions`: texts, log-probabilities and counts are those of `icejax.generate`."""

import numpy as np
import pytest

import icejax
from tests import tolerances

PATH, TEXT = "/v1/completions", "import os\nimport "
GREEDY = dict(temperature=0, max_tokens=9)


def test_a_text_and_its_counts_are_those_of_generate(server, alone):
    answer = server.ask(PATH, dict(prompt=TEXT, model="other-name", **GREEDY))
    expected = alone(TEXT, max_new_tokens=9, parse_special=True)
    [choice] = answer["choices"]
    assert choice == dict(index=0, text=expected.text, logprobs=None, finish_reason="length")
    assert (answer["object"], answer["model"], answer["id"][:5]) == ("text_completion", "other-name", "cmpl-")
    counts = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert counts == dict(prompt_tokens=17, completion_tokens=9, total_tokens=26)
    assert server.ask(PATH, dict(prompt=TEXT))["usage"]["completion_tokens"] == 16  # OpenAI's default


def test_prompts_of_all_forms_have_their_own_answers(server, alone):
    texts = [TEXT, "x = ["]
    expected = [alone(text, max_new_tokens=9).text for text in texts]
    tokens = [list(text.encode()) for text in texts]
    for prompt in (texts, tokens):
        choices = server.ask(PATH, dict(prompt=prompt, **GREEDY))["choices"]
        assert [(choice["index"], choice["text"]) for choice in choices] == list(enumerate(expected))
    for prompt in (texts[1], tokens[1]):
        assert server.ask(PATH, dict(prompt=prompt, **GREEDY))["choices"][0]["text"] == expected[1]


@pytest.mark.slow
def test_drawn_answers_are_those_of_the_seed(server, alone):
    body = dict(prompt=TEXT, n=2, seed=7, temperature=1.1, top_p=0.9, top_k=30, frequency_penalty=0.5, max_tokens=9)
    texts = [choice["text"] for choice in server.ask(PATH, body)["choices"]]
    sampling = icejax.Sampling(temperature=1.1, top_p=0.9, top_k=30, frequency_penalty=0.5)
    assert texts[0] == alone(TEXT, seed=7, sampling=sampling, max_new_tokens=9).text != texts[1]
    assert texts == [choice["text"] for choice in server.ask(PATH, body | dict(seed=7 + 2**32, top_k=30))["choices"]]
    assert texts != [choice["text"] for choice in server.ask(PATH, body | dict(seed=-7))["choices"]]


@pytest.mark.slow
def test_drawn_answers_of_several_prompts_are_in_order(server, alone):
    body = dict(prompt=[TEXT, "x = ["], n=2, seed=7, temperature=1.1, max_tokens=5)
    texts = [choice["text"] for choice in server.ask(PATH, body)["choices"]]
    options = dict(seed=7, sampling=icejax.Sampling(temperature=1.1), max_new_tokens=5)
    assert [texts[0], texts[2]] == [alone(prompt, **options).text for prompt in body["prompt"]]
    assert len({*texts}) == 4


def test_a_stop_string_ends_a_text_and_null_is_none(server, alone):
    whole = alone(TEXT, max_new_tokens=9).text
    answer = server.ask(PATH, dict(prompt=TEXT, stop=whole[3:5], **GREEDY))["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == (whole[: whole.index(whole[3:5])], "stop")
    assert server.ask(PATH, dict(prompt=TEXT, stop=None, user="x", unknown=[1], **GREEDY))["choices"][0]["text"] == whole


def test_log_probabilities_are_those_of_generate(server, alone):
    logprobs = server.ask(PATH, dict(prompt=TEXT, logprobs=2, **GREEDY))["choices"][0]["logprobs"]
    expected = alone(TEXT, max_new_tokens=9, logprobs=2)
    assert logprobs["tokens"] == [*expected.text] and logprobs["text_offset"] == [*range(9)]
    chosen = [token.chosen.logprob for token in expected.logprobs]
    np.testing.assert_allclose(logprobs["token_logprobs"], chosen, rtol=0, atol=tolerances.LOGITS)
    for top, token in zip(logprobs["top_logprobs"], expected.logprobs, strict=True):
        assert top.keys() == {one.text for one in token.top}


def test_echo_has_the_prompts_log_probabilities_as_the_harness_reads_them(server, alone):
    """lm-evaluation-harness sums `token_logprobs[ctx:-1]`, and a token is greedy if it equals the largest top one."""
    context, continuation = list(b"import "), list(b"os\n")
    body = dict(prompt=[context + continuation, list(TEXT.encode())], max_tokens=1, temperature=0, logprobs=1, echo=True)
    choices = server.ask(PATH, body | dict(seed=1234))["choices"]
    forced = alone(icejax.Request(prompt=context, forced_tokens=continuation, logprobs=1))
    logprobs = choices[0]["logprobs"]
    values, tops = logprobs["token_logprobs"][len(context) : -1], logprobs["top_logprobs"][len(context) : -1]
    expected = [token.chosen.logprob for token in forced.logprobs]
    np.testing.assert_allclose(values, expected, rtol=0, atol=tolerances.LOGITS)
    greedy = [token.chosen.token_id == token.top[0].token_id for token in forced.logprobs]
    assert [value == max(top.values()) for value, top in zip(values, tops, strict=True)] == greedy and len({*greedy}) == 2
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert "".join(logprobs["tokens"]) == choices[0]["text"] and choices[1]["text"].startswith(TEXT)
    assert logprobs["text_offset"] == [*range(len(logprobs["tokens"]))]


def test_an_echo_alone_has_no_answer(server):
    answer = server.ask(PATH, dict(prompt="import ", max_tokens=0, echo=True, logprobs=0))
    [choice] = answer["choices"]
    assert (choice["text"], len(choice["logprobs"]["tokens"])) == ("import ", 7)
    assert answer["usage"]["completion_tokens"] == 0
    assert server.ask(PATH, dict(prompt=[*b"ab"], max_tokens=0, echo=True))["choices"][0]["text"] == "ab"
    body = dict(prompt=["ab", "c"], max_tokens=0, echo=True, stream=True, stream_options=dict(include_usage=True))
    *events, last = server.events(PATH, body)
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 0)
    assert sorted(event["choices"][0]["text"] for event in events) == ["ab", "c"]
    assert {event["choices"][0]["finish_reason"] for event in events} == {"length"}


def test_a_stream_has_an_event_per_token(server, alone):
    body = dict(prompt=[TEXT, "x = ["], stream=True, echo=True, **GREEDY)
    events = server.events(PATH, body | dict(stream_options=dict(include_usage=True)))
    *events, last = events
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 18 == len(events)
    assert all(event["usage"] is None and event["id"] == last["id"] for event in events)
    for index, text in enumerate(body["prompt"]):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in choices) == text + alone(text, max_new_tokens=9).text
        assert [choice["finish_reason"] for choice in choices] == [None] * 8 + ["length"]
    assert "usage" not in server.events(PATH, body)[-1]


def test_a_text_before_a_suffix_is_filled_in_by_the_models_marks(server, alone, monkeypatch):
    """The bundled model has no such marks: three of its bytes stand for them."""
    from icejax.text import infill

    error = server.refusal(PATH, dict(prompt="a", suffix="b"))
    assert (error["param"], error["message"]) == ("suffix", infill.NO_INFILL)
    monkeypatch.setattr(infill, "FORMS", (("<", ">", "|"),))
    expected = alone([*b"<def f(> + b|"], max_new_tokens=9).text
    assert server.ask(PATH, dict(prompt="def f(", suffix=" + b", **GREEDY))["choices"][0]["text"] == expected
    assert server.refusal(PATH, dict(prompt=[1], suffix="b"))["message"] == "suffix needs prompts that are text, not token ids"
    error = server.refusal(PATH, dict(prompt="a", suffix="b", echo=True))
    assert error["message"] == "suffix and echo do not go together: leave one out"


@pytest.mark.slow
def test_ignored_ends_do_not_come(server, chatty):
    eos = chatty[0].config.eos_token_ids
    body = dict(prompt=TEXT, max_tokens=40, temperature=0, logit_bias={str(eos[0]): 100})
    assert server.ask(PATH, body)["choices"][0]["finish_reason"] == "stop"
    body |= dict(ignore_eos=True, logit_bias=None)
    assert server.ask(PATH, body)["choices"][0]["finish_reason"] == "length"
