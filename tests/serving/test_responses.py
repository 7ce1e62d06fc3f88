"""`/v1/responses`: the same answers as a chat's, as items, and in the events that OpenAI's clients and Codex read."""

import json
from dataclasses import replace
from typing import Literal

import pydantic
import pytest

import icejax
from icejax.serving.answers import Usage
from icejax.serving.errors import ApiError
from icejax.serving.responses.conversation import conversation
from icejax.serving.responses.output import SUMMARY, THOUGHTS, Output
from icejax.serving.tools.calls import Call, CallsOf
from icejax.serving.tools.events import CallArguments, CallBegin, CallEnd, Text

PATH = "/v1/responses"
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "def f(a):"}]
BODY = dict(model="bundled", instructions="s", input="def f(a):", max_output_tokens=9, temperature=0)
WITH_LOGPROBS = dict(include=["message.output_text.logprobs"], top_logprobs=2)


@pytest.fixture(scope="module")
def expected(chatty, alone):
    return alone(icejax.chat(chatty[1], MESSAGES), max_new_tokens=9, logprobs=2)


def read(data: bytes) -> list[dict]:
    """Returns the events of a stream, each of which is named by its type, without comments."""
    blocks = data.decode().split("\n\n")
    assert blocks.pop() == ""
    events = [block.split("\n") for block in blocks if not block.startswith(":")]
    values = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name for name, _ in events] == [f"event: {value['type']}" for value in values]
    assert [value["sequence_number"] for value in values] == [*range(len(values))]
    return values


def kinds(values: list[dict]) -> list[str]:
    """Returns the types of events, equal ones in a row once."""
    names = [value["type"].removeprefix("response.") for value in values]
    return [name for name, before in zip(names, [None, *names], strict=False) if name != before]


def test_a_response_is_the_answer_of_generate(server, expected):
    response = server.ask(PATH, BODY | WITH_LOGPROBS | dict(store=False, metadata={"a": "b"}))
    [item] = response["output"]
    [part] = item["content"]
    assert (item["type"], item["role"], part["type"], part["text"]) == ("message", "assistant", "output_text", expected.text)
    assert [token["top_logprobs"][1]["token"] for token in part["logprobs"]] == [one.top[1].text for one in expected.logprobs]
    assert (response["status"], item["status"]) == ("incomplete", "incomplete")
    assert response["incomplete_details"] == dict(reason="max_output_tokens") and response["error"] is None
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (expected.prompt_tokens, 9)
    assert usage["total_tokens"] == expected.prompt_tokens + 9 and usage["input_tokens_details"]["cached_tokens"] == 0
    assert response["store"] is False and response["metadata"] == {"a": "b"} and response["temperature"] == 0


def test_a_stream_has_the_events_of_openai_in_their_order(server, expected):
    values = read(server.send(PATH, BODY | WITH_LOGPROBS | dict(stream=True)).read())
    text = ["output_text.delta", "output_text.done"]
    item = ["output_item.added", "content_part.added", *text, "content_part.done", "output_item.done"]
    assert kinds(values) == ["created", "in_progress", *item, "incomplete"]
    deltas = [value for value in values if value["type"].endswith("text.delta")]
    assert "".join(value["delta"] for value in deltas) == expected.text and len(deltas) == 9
    done, response = values[-4], values[-1]["response"]
    assert done["text"] == expected.text and done["logprobs"] == [token for value in deltas for token in value["logprobs"]]
    assert {value["item_id"] for value in values if "item_id" in value} == {response["output"][0]["id"]}
    begun = values[0]["response"]
    assert (begun["id"], begun["status"], begun["output"]) == (response["id"], "in_progress", [])
    whole = server.ask(PATH, BODY | WITH_LOGPROBS)
    same = ("status", "incomplete_details", "usage", "text", "tools", "instructions")
    assert {name: whole[name] for name in same} == {name: response[name] for name in same}
    assert whole["output"][0]["content"] == response["output"][0]["content"]


def test_a_response_that_waits_sends_events(server, monkeypatch):
    monkeypatch.setattr("icejax.serving.streaming.PATIENCE_S", 0.001)
    values = read(server.send(PATH, BODY | dict(stream=True)).read())
    types = [value["type"] for value in values]
    assert types[:3] == ["response.created", "response.in_progress", "response.in_progress"]
    assert types[-1] == "response.incomplete"


def test_an_answer_that_ends_by_itself_is_completed(server, expected):
    stop = expected.text[3:5]
    response = server.ask(PATH, BODY | dict(stop=stop))
    assert (response["status"], response["output"][0]["status"]) == ("completed", "completed")
    assert response["output"][0]["content"][0]["text"] == expected.text[: expected.text.index(stop)]
    values = read(server.send(PATH, BODY | dict(stop=expected.text[0], stream=True)).read())
    assert values[-1]["type"] == "response.completed" and values[-1]["response"]["output"][0]["content"][0]["text"] == ""


@pytest.mark.parametrize("thoughts, field", [(THOUGHTS, "content"), (SUMMARY, "summary")])
def test_thoughts_are_an_item_before_the_text(expected, thoughts, field):
    output = Output({}, Usage(), thoughts=thoughts, tools={})
    pieces = [("a", ""), ("b", ""), (None, "c"), (None, "d")]
    pieces = [replace(expected, reasoning=reasoning, text=text, finish_reason=None) for reasoning, text in pieces]
    pieces[-1] = replace(pieces[-1], finish_reason="stop")
    values = read(
        b"".join([*output.begun(), *(event for piece in pieces for event in output.take(piece, CallsOf(None).read(piece), []))])
    )
    items = values[-1]["response"]["output"]
    assert [(item["type"], item["status"]) for item in items] == [("reasoning", "completed"), ("message", "completed")]
    assert items[0][field][0]["text"] == "ab" and items[1]["content"][0]["text"] == "cd"
    part, text = (thoughts.of_part, thoughts.of_text)
    thought = ["output_item.added", f"{part}.added", f"{text}.delta", f"{text}.done", f"{part}.done", "output_item.done"]
    assert kinds(values)[2:8] == thought and kinds(values)[8] == "output_item.added"
    assert [value["output_index"] for value in values if value["type"].endswith(".added")] == [0, 0, 1, 1]


def test_calls_are_items_behind_the_text(expected):
    output, call = Output({}, Usage(), thoughts=THOUGHTS, tools={}), Call("c1", "f")
    found = [
        [(None, Text("a"))],
        [(call, CallBegin(0, "f")), (call, CallArguments(0, '{"a"'))],
        [(call, CallArguments(0, ": 1}")), (call, CallEnd(0))],
        [(call, CallBegin(1, "g"))],
    ]
    pieces = [replace(expected, text="", finish_reason=None)] * 3 + [replace(expected, text="", finish_reason="length")]
    values = read(b"".join(event for piece, one in zip(pieces, found, strict=True) for event in output.take(piece, one, [])))
    message, first, second = output.response["output"]
    assert (message["content"][0]["text"], message["status"]) == ("a", "completed")
    assert first == first | dict(type="function_call", call_id="c1", name="f", arguments='{"a": 1}', status="completed")
    assert second == second | dict(name="g", arguments="", status="incomplete") and output.response["status"] == "incomplete"
    call = [f"output_item.{name}" for name in ("added", "done")]
    arguments = [f"function_call_arguments.{name}" for name in ("delta", "done")]
    assert kinds(values)[6:] == [call[0], *arguments, call[1], call[0], arguments[1], call[1], "incomplete"]
    done = [value for value in values if value["type"] == "response.function_call_arguments.done"]
    assert [(one["item_id"], one["arguments"]) for one in done] == [(first["id"], '{"a": 1}'), (second["id"], "")]


def test_an_error_behind_the_headers_is_a_failed_response():
    output = Output({}, Usage(), thoughts=THOUGHTS, tools={})
    [*_, value] = read(b"".join([*output.begun(), output.failed(ApiError(503, "it stops", code="draining"))]))
    assert value["type"] == "response.failed" and value["response"]["status"] == "failed"
    assert value["response"]["error"] == dict(code="draining", message="it stops")


def test_a_call_that_was_cut_is_incomplete(expected):
    output, call = Output({}, Usage(), thoughts=THOUGHTS, tools={}), Call("c1", "f", '{"a": "b')
    parts = [(call, CallBegin(0, "f")), (call, CallArguments(0, call.arguments)), (call, CallEnd(0))]
    output.take(replace(expected, text="", finish_reason="length"), parts, [])
    [item] = output.response["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"a": "b')


def test_a_token_without_text_has_its_log_probability_with_the_next_text(expected):
    output, call = Output({}, Usage(), thoughts=THOUGHTS, tools={}), Call("c1", "f", "{}")
    none, end = (replace(expected, text="", finish_reason=reason) for reason in (None, "stop"))
    begun = (call, CallBegin(0, "f"))
    for piece, parts, name in (
        (none, [], "a"),
        (none, [(None, Text("é"))], "b"),
        (none, [begun], "c"),
        (end, [(None, Text("d"))], "d"),
    ):
        output.take(piece, parts, [dict(token=name)])
    parts = [item["content"][0] for item in output.response["output"] if item["type"] == "message"]
    assert [[one["token"] for one in part["logprobs"]] for part in parts] == [["a", "b"], ["d"]]


@pytest.mark.parametrize("stream", [True, False])
def test_a_repeated_field_that_is_too_deep_is_refused_and_takes_no_place(server, stream):
    deep = json.loads("[" * 400 + "]" * 400)
    body = BODY | dict(stream=stream, text=dict(format=dict(type="text", x=deep)))
    assert server.refusal(PATH, body)["message"] == "the request is nested more than 50 levels deep"
    assert server.service.open_answers == 0


def test_items_become_the_messages_of_a_chat():
    call = dict(type="function_call", id="fc_1", call_id="c1", name="f", arguments='{"a": 1}', status="completed")
    items = [
        dict(type="message", role="developer", content=[dict(type="input_text", text="d")]),
        dict(role="user", content=[dict(type="input_text", text="u"), dict(type="input_text", text="v")]),
        dict(type="reasoning", id="rs_1", summary=[], content=[dict(type="reasoning_text", text="t")], encrypted_content=None),
        dict(type="message", role="assistant", content=[dict(type="output_text", text="a", annotations=[])]),
        call,
        call | dict(call_id="c2"),
        dict(type="function_call_output", call_id="c1", output="1"),
        dict(type="function_call_output", call_id="c2", output=[dict(type="input_text", text="2")]),
        dict(type="reasoning", summary=[dict(type="summary_text", text="w")]),
        call | dict(call_id="c3"),
        dict(type="reasoning", summary=[dict(type="summary_text", text="x")]),
        call | dict(call_id="c4"),
        dict(role="developer", content="later"),
    ]
    function = dict(name="f", arguments='{"a": 1}')
    c1, c2, c3, c4 = (dict(id=name, type="function", function=function) for name in ("c1", "c2", "c3", "c4"))
    assert conversation("s", items) == [
        dict(role="system", content="s\n\nd"),
        dict(role="user", content="u\nv"),
        dict(role="assistant", content="a", reasoning="t", tool_calls=[c1, c2]),
        dict(role="tool", tool_call_id="c1", content="1"),
        dict(role="tool", tool_call_id="c2", content="2"),
        dict(role="assistant", content="", reasoning="w", tool_calls=[c3]),
        dict(role="assistant", content="", reasoning="x", tool_calls=[c4]),
        dict(role="system", content="later"),
    ]


CALLING = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments.a }}</tool_call>{% endfor %}{% endfor %}"
)
ONE = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"type": "function", "name": "f", "parameters": ONE}


def test_a_function_is_called_and_its_result_goes_back(server, chatty, monkeypatch):
    """A model of bytes, which knows no tools, writes what the grammar of a required call allows."""
    monkeypatch.setattr(server.service.tokenizer, "chat_template", CALLING)
    asked = BODY | dict(input="a", tools=[FUNCTION, {"type": "web_search"}], tool_choice="required", max_output_tokens=120)
    asked |= dict(parallel_tool_calls=False)
    response = server.ask(PATH, asked)
    [call] = response["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "f", {"a": 1})
    assert response["status"] == "completed" and response["tools"] == [FUNCTION]
    values = read(server.send(PATH, asked | dict(stream=True)).read())
    arguments = [f"function_call_arguments.{name}" for name in ("delta", "done")]
    assert kinds(values)[2:] == ["output_item.added", *arguments, "output_item.done", "completed"]
    deltas = "".join(value["delta"] for value in values if value["type"].endswith("arguments.delta"))
    assert deltas == call["arguments"] == values[-1]["response"]["output"][0]["arguments"]
    result = dict(type="function_call_output", call_id=call["call_id"], output="2")
    again = server.ask(PATH, BODY | dict(instructions=None, input=[dict(role="user", content="a"), call, result]))
    assert again["usage"]["input_tokens"] == len("a<tool_call>1</tool_call>2")
    named = asked | dict(tool_choice=dict(type="function", name="g"))
    assert server.refusal(PATH, named)["message"] == "tool_choice names 'g', which is none of the tools"


def test_a_text_follows_its_schema(server):
    schema = dict(type="json_schema", name="n", schema=ONE)
    response = server.ask(PATH, BODY | dict(text=dict(format=schema), max_output_tokens=60))
    assert json.loads(response["output"][0]["content"][0]["text"]) == {"a": 1}
    assert response["text"]["format"] == schema and response["status"] == "completed"


@pytest.mark.parametrize(
    "body, param, message",
    [
        (dict(previous_response_id="resp_1"), "previous_response_id", "previous_response_id is not supported: the server stores no responses: send the whole conversation as 'input', with the output items of earlier responses"),
        (dict(background=True), "background", "background is not supported: the server stores no responses: leave it out, and set 'stream' for a long answer"),
        (dict(prompt={"id": "p"}), "prompt", "prompt is not supported: the server stores no prompts: send 'instructions' and 'input'"),
        (dict(max_tokens=3), "max_tokens", "max_tokens is not supported: its name in this API is max_output_tokens"),
        (dict(response_format={"type": "json_object"}), "response_format", "response_format is not supported: its name in this API is text.format"),
        (dict(text=dict(format=dict(type="json_schema", name="n"))), "text", "text.format of type json_schema needs a schema, which is an object, got None"),
        (dict(tools=[FUNCTION]), "tools", "the chat template has no tool calls of a known form (hermes, Qwen3-Coder, Mistral, Llama 3, harmony): leave tools out"),
        (dict(truncation="auto"), "truncation", "truncation must be 'disabled': the server cuts no conversation"),
        (dict(n=2), "n", "n must be 1: a response has one answer"),
        (dict(input=5), "input", "input must be text, or a list of items"),
        (dict(input=[]), "messages", None),
        (dict(max_output_tokens=0), "max_output_tokens", "max_output_tokens: should be greater than or equal to 1, got 0"),
        (dict(input=[dict(type="item_reference", id="x")]), "input", "input has an item of type 'item_reference': expected message, reasoning, or a call of a function or custom tool and its output"),
        (dict(input=[dict(role="user", content=[dict(type="input_image")])]), "input", "input has a part of type 'input_image': expected text, the only type that is read"),
        (dict(input=[dict(role="user")]), "input", "a content in input must be text, or a list of text parts, got None"),
        (dict(input=[dict(type="function_call", call_id="c", name="f")]), "input", "input has a function_call whose arguments is no text"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(server, body, param, message):
    error = server.refusal(PATH, BODY | dict(instructions=None) | body)
    assert error["param"] == param and (message is None or error["message"] == message), error


@pytest.mark.slow
def test_the_openai_package_reads_responses(server, expected):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x", max_retries=0)
    assert client.responses.create(**BODY).output_text == expected.text
    stop = expected.text[5:7]
    with client.responses.stream(**BODY, extra_body=dict(stop=stop)) as stream:
        names = {event.type for event in stream}
        final = stream.get_final_response()  # only of a response that is completed
    assert final.output_text == expected.text[: expected.text.index(stop)] and "response.output_text.delta" in names
    assert final.usage.input_tokens == expected.prompt_tokens
    again = [MESSAGES[1], *(item.model_dump() for item in final.output), dict(role="user", content="b")]
    assert client.responses.create(**BODY | dict(input=again)).usage.input_tokens > expected.prompt_tokens

    class One(pydantic.BaseModel):
        a: Literal["x"]

    assert client.responses.parse(**BODY | dict(max_output_tokens=60), text_format=One).output_parsed == One(a="x")
    with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
        client.responses.create(**BODY, previous_response_id="resp_1")
