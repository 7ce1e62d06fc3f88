"""`/v1/messages`, as Anthropic's clients read it: the same answers as a chat's, in blocks."""

import json

import pytest

import icejax

PATH = "/v1/messages"
BODY = dict(model="bundled", system="s", messages=[{"role": "user", "content": "def f(a):"}], max_tokens=9, temperature=0)


@pytest.fixture(scope="module")
def expected(chatty, alone):
    messages = [{"role": "system", "content": "s"}, *BODY["messages"]]
    return alone(icejax.chat(chatty[1], messages), max_new_tokens=9)


def read(server, body) -> list[dict]:
    """Returns the events of a stream, each of which is named by its type."""
    blocks = server.send(PATH, body | dict(stream=True)).read().decode().split("\n\n")
    assert blocks.pop() == ""
    events = [block.split("\n") for block in blocks]
    values = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name for name, _ in events] == [f"event: {value['type']}" for value in values]
    return values


def test_an_answer_is_that_of_generate(server, expected):
    answer = server.ask(PATH, BODY)
    assert answer["content"] == [{"type": "text", "text": expected.text}]
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "max_tokens")
    counts = dict(input_tokens=expected.prompt_tokens, output_tokens=9)
    assert answer["usage"] == counts | dict(cache_read_input_tokens=0, cache_creation_input_tokens=0)
    assert server.ask(PATH + "/count_tokens", BODY) == {"input_tokens": expected.prompt_tokens}


def test_a_stream_has_the_same_text_in_one_block(server, expected):
    values = [value for value in read(server, BODY) if value["type"] != "ping"]
    kinds = [value["type"] for value in values]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[2:] == ["content_block_delta"] * 9 + ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(value["delta"]["text"] for value in values if value["type"] == "content_block_delta") == expected.text
    assert values[0]["message"]["usage"]["input_tokens"] == expected.prompt_tokens
    assert values[-2]["delta"] == dict(stop_reason="max_tokens", stop_sequence=None)


def test_a_message_that_waits_sends_pings(server, monkeypatch):
    monkeypatch.setattr("icejax.serving.streaming.PATIENCE_S", 0.001)
    types = [value["type"] for value in read(server, BODY)]
    assert types[:2] == ["ping", "ping"] and types[-1] == "message_stop"


def test_a_stop_sequence_is_named_if_it_is_the_only_one(server, expected):
    stop = expected.text[3:5]
    answer = server.ask(PATH, BODY | dict(stop_sequences=[stop]))
    assert answer["content"][0]["text"] == expected.text[: expected.text.index(stop)]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert server.ask(PATH, BODY | dict(stop_sequences=[stop, "\0"]))["stop_sequence"] is None


def test_thoughts_of_earlier_answers_stand_beside_their_text(server, chatty, alone):
    thought = {"type": "thinking", "thinking": "t", "signature": "x"}
    said = [{"role": "assistant", "content": [thought, {"type": "text", "text": "b"}]}, {"role": "user", "content": "c"}]
    messages = [{"role": "system", "content": "s"}, *BODY["messages"]]
    plain = [*messages, {"role": "assistant", "content": "b", "reasoning": "t"}, said[1]]
    body = BODY | dict(messages=[*BODY["messages"], *said], system=[{"type": "text", "text": "s", "cache_control": {}}])
    expected = alone(icejax.chat(chatty[1], plain), max_new_tokens=9)
    assert server.ask(PATH, body)["content"][0]["text"] == expected.text


def test_a_message_follows_its_schema(server):
    one = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    form = dict(type="json_schema", schema=one)
    answer = server.ask(PATH, BODY | dict(max_tokens=60, stop_sequences=["\0"], output_config=dict(format=form)))
    assert (json.loads(answer["content"][0]["text"]), answer["stop_reason"]) == ({"a": 1}, "end_turn")


@pytest.mark.parametrize(
    "body, message",
    [
        (BODY | dict(max_tokens=None), "'max_tokens' is missing: expected it in the body"),
        (BODY | dict(tools=[{"name": "f"}]), "the chat template has no tool calls of a known form (hermes, Qwen3-Coder, Mistral, Llama 3, harmony): leave tools out"),
        (BODY | dict(tool_choice={"type": "any"}), "tool_choice needs tools, and the request has none"),
        (BODY | dict(tool_choice={"type": "some"}), "tool_choice must be of type auto, any, tool or none, got {'type': 'some'}"),
        (BODY | dict(output_config=dict(format=dict(type="json_schema"))), "output_config.format of type json_schema needs a schema, which is an object, got None"),
        (BODY | dict(system=5), "system must be text, or a list of text blocks"),
    ],
)  # fmt: skip
def test_errors_are_objects_of_anthropics_form(server, body, message):
    assert server.ask(PATH, body, status=400) == dict(type="error", error=dict(type="invalid_request_error", message=message))


@pytest.mark.slow
def test_the_anthropic_package_reads_it(server, expected):
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="x", max_retries=0)
    body = {name: value for name, value in BODY.items() if name != "temperature"} | dict(extra_body=dict(temperature=0))
    answer = client.messages.create(**body)
    assert answer.content[0].text == expected.text and answer.usage.output_tokens == 9
    with client.messages.stream(**body) as stream:
        assert "".join(stream.text_stream) == expected.text
        assert stream.get_final_message().stop_reason == "max_tokens"
    asked = {name: BODY[name] for name in ("model", "messages", "system")}
    assert client.messages.count_tokens(**asked).input_tokens == expected.prompt_tokens
    with pytest.raises(anthropic.BadRequestError, match="no tool calls of a known form"):
        client.messages.create(**body, tools=[{"name": "f", "input_schema": {"type": "object"}}])
