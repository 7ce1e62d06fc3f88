"""Tools and JSON schemas over HTTP: a model of bytes, which knows neither, writes what its grammar allows."""

import copy
import json

import pytest

import icejax
from tests.serving.conftest import SIZES

CHAT, MESSAGES, ASKED = "/v1/chat/completions", "/v1/messages", [{"role": "user", "content": "def f(a):"}]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome </tool_call>"]}, "days": {"type": "integer", "maximum": 9, "minimum": 1}},
        "required": ["city", "days"], "additionalProperties": False}  # fmt: skip
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": CITY}},
         {"type": "function", "function": {"name": "now", "parameters": EMPTY}}]  # fmt: skip
BODY = dict(messages=ASKED, tools=TOOLS, max_tokens=120, temperature=0)
ANTHROPIC = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def calling(chatty):
    """A server whose chat template has hermes' calls, and its tokenizer."""
    from icejax.serving.service import Service
    from tests.helpers.server import live

    model, tokenizer = chatty[0], copy.deepcopy(chatty[1])
    tokenizer.chat_template = TEMPLATE

    def start():
        return model, tokenizer, icejax.Engine(model, tokenizer, cache=icejax.Full(), **SIZES | dict(context_length=640))

    with live(Service(names=("bundled",), root="here", places=SIZES["batch_size"]), start) as server:
        yield server


def merged(events) -> tuple[dict, str]:
    """Returns the message of a stream's deltas, as OpenAI's clients put it together, and its end."""
    message, reason = dict(content="", tool_calls=[]), None
    for choice in (event["choices"][0] for event in events):
        message["content"] += choice["delta"].get("content") or ""
        for part in choice["delta"].get("tool_calls", ()):
            if part["index"] == len(message["tool_calls"]):
                assert part["id"].startswith("call_") and part["type"] == "function"
                message["tool_calls"].append(dict(name=part["function"]["name"], arguments=""))
            message["tool_calls"][part["index"]]["arguments"] += part["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return message, reason


@pytest.mark.parametrize("choice, parallel", [(NAMED, False), ("required", True)])
def test_a_required_call_follows_its_schema_whole_and_in_a_stream(calling, choice, parallel):
    jsonschema = pytest.importorskip("jsonschema")
    body = BODY | dict(tool_choice=choice, parallel_tool_calls=parallel, seed=1, temperature=0 if parallel else 1)
    whole = calling.ask(CHAT, body)["choices"][0]
    calls = [call["function"] for call in whole["message"]["tool_calls"]]
    for call in calls if whole["finish_reason"] == "tool_calls" else calls[:-1]:  # the limit may cut the last one
        jsonschema.validate(json.loads(call["arguments"]), dict(weather=CITY, now=EMPTY)[call["name"]])
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] is None or parallel
    assert calls[0]["name"] == "weather" or choice == "required"
    message, reason = merged(calling.events(CHAT, body | dict(stream=True)))
    assert (message, reason) == (dict(content=whole["message"]["content"] or "", tool_calls=calls), whole["finish_reason"])


@pytest.mark.slow
def test_without_a_need_to_call_the_answer_is_the_models_own(calling, chatty):
    free = calling.ask(CHAT, BODY | dict(max_tokens=9))["choices"][0]
    model, tokenizer = chatty[0], copy.deepcopy(chatty[1])
    tokenizer.chat_template = TEMPLATE
    prompt = icejax.chat(tokenizer, ASKED, tools=TOOLS)
    expected = icejax.generate(model, tokenizer, prompt, cache=icejax.Full(), context_length=640, max_new_tokens=9)[0]
    assert free["message"] == dict(role="assistant", content=expected.text, refusal=None)
    assert calling.ask(CHAT, BODY | dict(max_tokens=9, tool_choice="none"))["choices"][0]["message"]["content"] == expected.text


def test_earlier_calls_and_results_reach_the_template(calling):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    said = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    said.append({"role": "tool", "tool_call_id": "call_1", "content": "rain"})
    counted = calling.ask("/tokenize", dict(messages=said))["tokens"]
    text = calling.ask("/detokenize", dict(tokens=counted))["prompt"]
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call><tool>rain' in text
    blocks = [{"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Oslo"}}]
    result = [{"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "rain"}]}]
    anthropic = [*ASKED, {"role": "assistant", "content": blocks}, {"role": "user", "content": result}]
    assert calling.ask(MESSAGES + "/count_tokens", dict(messages=anthropic)) == dict(input_tokens=len(counted))
    assert calling.ask(MESSAGES + "/count_tokens", dict(messages=anthropic, tools=ANTHROPIC))["input_tokens"] > len(counted)


@pytest.mark.slow
def test_anthropics_blocks_have_the_call(calling):
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    body = dict(messages=ASKED, tools=ANTHROPIC, tool_choice=choice, max_tokens=120, temperature=0)
    answer = calling.ask(MESSAGES, body)
    [block] = answer["content"]
    assert (answer["stop_reason"], block["type"], block["name"]) == ("tool_use", "tool_use", "weather")
    assert set(block["input"]) == {"city", "days"}
    data = calling.send(MESSAGES, body | dict(stream=True)).read().decode().split("\n\n")[:-1]
    events = [json.loads(one.split("data: ")[1]) for one in data if not one.startswith(":")]
    events = [event for event in events if event["type"] != "ping"]
    begun, *deltas, ended, delta, _ = events[1:]
    assert begun["content_block"] == dict(type="tool_use", id=begun["content_block"]["id"], name="weather", input={})
    assert json.loads("".join(one["delta"]["partial_json"] for one in deltas)) == block["input"] and len(deltas) > 9
    assert (ended["type"], delta["delta"]["stop_reason"]) == ("content_block_stop", "tool_use")


@pytest.mark.slow
def test_an_answer_follows_a_response_format(calling):
    jsonschema = pytest.importorskip("jsonschema")
    form = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}
    for body in (dict(response_format=form, n=2, temperature=1.5, seed=4), dict(structured_outputs={"json": CITY})):
        answer = calling.ask(CHAT, dict(messages=ASKED, max_tokens=150, temperature=0, frequency_penalty=0.5) | body)
        for choice in answer["choices"]:
            jsonschema.validate(json.loads(choice["message"]["content"]), CITY)
            assert choice["finish_reason"] == "stop"
    body = dict(prompt="x = ", max_tokens=20, temperature=0)
    assert calling.ask("/v1/completions", body | dict(guided_choice=["yes", "no"]))["choices"][0]["text"] in ("yes", "no")
    begun = calling.ask("/v1/completions", body | dict(response_format={"type": "json_object"}, temperature=2))
    assert begun["choices"][0]["text"].startswith("{")


@pytest.mark.parametrize(
    "body, message",
    [
        (dict(response_format={"type": "json_schema"}), "response_format must have a json_schema with a schema, which is an object"),
        (dict(response_format={"type": "xml"}), "response_format of type 'xml' is not supported: expected text, json_object or json_schema"),
        (dict(guided_json={"type": "foo"}), "the grammar cannot be followed: .*Invalid type: foo"),
        (dict(guided_regex="(?=a)"), "the grammar cannot be followed: .* look-ahead and look-behind, is not supported"),
        (dict(guided_json={}, guided_regex="a"), "the request has guided_json and guided_regex: give one of them"),
        (dict(structured_outputs={"xml": "x"}), r"structured_outputs must have one of json, regex, choice, grammar and json_object, got {'xml': 'x'}"),
        (dict(grammar="x"), "the grammar is neither Lark, with a rule 'start:', nor GBNF: .*"),
        (dict(grammar="start: x"), "the grammar cannot be followed: .*unknown name: \"x\""),
        (dict(guided_json={"enum": ["x" * 2**18]}), "a grammar has 26.... characters, of at most 262144: shorten its schemas"),
        (dict(guided_json={"properties": {f"k{i}": {} for i in range(1001)}}), "the schema has an object of 1001 keys: expected at most 1000"),
        (dict(tools=[{"type": "web_search"}]), r"tools\[0\] must be an object of type 'function' with a function"),
        (dict(tools=[{"type": "function", "function": {"name": "a\x1bb"}}]), r"tools\[0\]: the name must be 1 to 128 letters, .*, got 'a\\x1bb'"),
        (dict(tools=TOOLS[:1] * 2), "tools must have different names, and be at most 512"),
        (dict(tool_choice="required"), "tool_choice needs tools, and the request has none"),
        (dict(tools=TOOLS, tool_choice="any"), "tool_choice must be none, auto, required, or an object of type 'function' with a name, got 'any'"),
        (dict(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "x"}}), "tool_choice names 'x', which is none of the tools"),
        (dict(tools=TOOLS, tool_choice="required", response_format={"type": "json_object"}), "the request asks for a call, or has strict tools, and has response_format: give one of them"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_with_one_line(calling, body, message):
    import re

    assert re.fullmatch(message, calling.refusal(CHAT, dict(messages=ASKED) | body)["message"]), body


def test_tools_need_a_form_that_is_known(server):
    message = (
        "the chat template has no tool calls of a known form (hermes, Qwen3-Coder, Mistral, Llama 3, harmony): leave tools out"
    )
    assert server.refusal(CHAT, BODY)["message"] == message
    body = dict(messages=ASKED, tools=[{"type": "web_search_20260101", "name": "web_search"}], max_tokens=1)
    error = server.ask(MESSAGES, body, status=400)["error"]["message"]
    assert error == "a tool of type 'web_search_20260101' is not supported: expected one with a name and an input_schema"


@pytest.mark.slow
def test_the_openai_package_reads_calls_and_schemas(calling):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{calling.port}/v1", api_key="x", max_retries=0, timeout=300)
    body = dict(model="bundled", messages=ASKED, temperature=0, max_tokens=150)
    asked = body | dict(tools=TOOLS, tool_choice=NAMED, parallel_tool_calls=False)
    choice = client.chat.completions.create(**asked).choices[0]
    call = choice.message.tool_calls[0]
    assert (choice.finish_reason, call.type, call.function.name) == ("tool_calls", "function", "weather")
    with client.chat.completions.stream(**asked) as stream:
        read = stream.get_final_completion().choices[0]
    assert read.finish_reason == "tool_calls" and read.message.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    messages = [*ASKED, choice.message.model_dump(exclude_none=True), result]
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    answer = client.chat.completions.create(
        **body | dict(messages=messages), tools=TOOLS, tool_choice="none", response_format=form
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"city", "days"}


@pytest.mark.slow
def test_the_anthropic_package_reads_calls(calling):
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{calling.port}", api_key="x", max_retries=0, timeout=300)
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    body = dict(model="bundled", max_tokens=150, tools=ANTHROPIC, tool_choice=choice, extra_body=dict(temperature=0))
    answer = client.messages.create(messages=ASKED, **body)
    [block] = answer.content
    assert (answer.stop_reason, block.type, set(block.input)) == ("tool_use", "tool_use", {"city", "days"})
    with client.messages.stream(messages=ASKED, **body) as stream:
        assert stream.get_final_message().content[0].input == block.input
