"""`/v1/chat/completions`: the chat template, streams with roles and thoughts, log-probabilities."""

import numpy as np
import pytest

import icejax
from tests import tolerances

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "def f(a):"}]
GREEDY = dict(temperature=0, max_tokens=9)


@pytest.fixture(scope="module")
def expected(chatty, alone):
    return alone(icejax.chat(chatty[1], MESSAGES), max_new_tokens=9, logprobs=2)


def test_an_answer_is_that_of_generate(server, expected):
    answer = server.ask(PATH, dict(messages=MESSAGES, **GREEDY))
    message = dict(role="assistant", content=expected.text, refusal=None)
    assert answer["choices"] == [dict(index=0, message=message, logprobs=None, finish_reason="length")]
    assert (answer["object"], answer["model"]) == ("chat.completion", "bundled")
    assert answer["usage"]["prompt_tokens"] == expected.prompt_tokens


def test_messages_of_all_forms_are_one_chat(server, expected):
    parts = [{"type": "text", "text": "def f(a):", "cache_control": {"type": "ephemeral"}}]
    messages = [{"role": "developer", "content": "s", "name": "me"}, {"role": "user", "content": parts, "annotations": []}]
    body = dict(messages=messages, max_completion_tokens=9, max_tokens=3, temperature=0)
    body |= dict(response_format={"type": "text"}, tools=[], parallel_tool_calls=True, metadata={}, store=False)
    assert server.ask(PATH, body)["choices"][0]["message"]["content"] == expected.text


def test_a_stream_begins_with_the_role_and_ends_with_the_usage(server, expected):
    *events, last = server.events(PATH, dict(messages=MESSAGES, stream=True, stream_options=dict(include_usage=True), **GREEDY))
    choices = [event["choices"][0] for event in events]
    assert choices[0] == dict(index=0, delta=dict(role="assistant", content=""), logprobs=None, finish_reason=None)
    assert "".join(choice["delta"]["content"] for choice in choices) == expected.text
    assert [choice["finish_reason"] for choice in choices] == [None] * 9 + ["length"]
    assert {event["object"] for event in [*events, last]} == {"chat.completion.chunk"}
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 9


def test_log_probabilities_are_those_of_generate(server, expected):
    answer = server.ask(PATH, dict(messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY))
    content = answer["choices"][0]["logprobs"]["content"]
    for token, one in zip(content, expected.logprobs, strict=True):
        assert (token["token"], token["bytes"]) == (one.chosen.text, list(one.chosen.bytes))
        assert [top["token"] for top in token["top_logprobs"]] == [top.text for top in one.top]
        values = [token["logprob"], *(top["logprob"] for top in token["top_logprobs"])]
        expected_values = [one.chosen.logprob, *(top.logprob for top in one.top)]
        np.testing.assert_allclose(values, expected_values, rtol=0, atol=tolerances.LOGITS)
    events = server.events(PATH, dict(messages=MESSAGES, logprobs=True, stream=True, **GREEDY))
    streamed = [event["choices"][0]["logprobs"] for event in events[1:]]
    assert [one["content"][0]["token"] for one in streamed] == [token["token"] for token in content]


def test_a_last_message_of_the_assistant_is_continued(server, chatty, alone):
    messages = [*MESSAGES, {"role": "assistant", "content": "retu", "reasoning_content": "a"}]
    text = server.ask(PATH, dict(messages=messages, **GREEDY))["choices"][0]["message"]["content"]
    assert text == alone(icejax.chat(chatty[1], messages), max_new_tokens=9).text


def test_an_answer_without_a_limit_has_as_many_tokens_as_fit(server):
    usage = server.ask(PATH, dict(messages=MESSAGES, temperature=0, ignore_eos=True))["usage"]
    assert usage["completion_tokens"] == 200


@pytest.mark.slow
def test_thoughts_come_apart(chatty):
    """A template whose prompt opens the thoughts: what comes before the closing mark is reasoning, in every form."""
    import copy

    from icejax.serving.service import Service
    from tests.helpers.server import live
    from tests.serving.conftest import SIZES, TEMPLATE

    model, tokenizer = chatty[0], copy.deepcopy(chatty[1])
    tokenizer.chat_template = TEMPLATE + "{% if add_generation_prompt %}<think>{% endif %}{# </think> #}"
    expected = icejax.generate(model, tokenizer, icejax.chat(tokenizer, MESSAGES), cache=icejax.Full(), max_new_tokens=9)[0]
    assert expected.reasoning
    body = dict(messages=MESSAGES, **GREEDY)
    start = lambda: (model, tokenizer, icejax.Engine(model, tokenizer, cache=icejax.Full(), **SIZES))  # noqa: E731
    with live(Service(names=("m",), root="m"), start) as server:
        answer = server.ask(PATH, body)
        events = server.events(PATH, body | dict(stream=True))
        form = dict(structured_outputs=dict(regex="<think>b</think> c"), max_tokens=40, temperature=0)
        completion = server.ask("/v1/completions", dict(prompt="x", **form))["choices"][0]["text"]
        pieces = server.events("/v1/completions", dict(prompt="x", stream=True, **form))
        tokens = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    message, deltas = answer["choices"][0]["message"], [event["choices"][0]["delta"] for event in events]
    assert message["reasoning"] == message["reasoning_content"] == expected.reasoning and message["content"] == expected.text
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == expected.reasoning
    assert all("content" in delta for delta in deltas) and 0 < tokens <= 9
    # Thoughts and their marks stay in a completion.
    assert completion.startswith("<think>") and completion == "".join(piece["choices"][0]["text"] for piece in pieces)
