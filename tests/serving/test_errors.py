"""What is refused: status, message, field and code of OpenAI's error objects. No body makes the server fail."""

import json
import re
import socket
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import icejax
from icejax.serving.errors import ApiError
from icejax.serving.schemas import CompletionRequest, parsed
from icejax.serving.service import Service
from tests.helpers.server import live, wait_for
from tests.serving.conftest import SIZES

COMPLETIONS, CHAT, TOKENIZE, RESPONSES = "/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/responses"
MESSAGES = [{"role": "user", "content": "a"}]
TEXT = dict(prompt="a", max_tokens=1, temperature=0)


@pytest.mark.parametrize(
    "path, body, param, message",
    [
        (COMPLETIONS, {}, "prompt", "'prompt' is missing: expected it in the body"),
        (COMPLETIONS, dict(prompt=5), "prompt", "prompt must be text, token ids, or a list of either"),
        (COMPLETIONS, dict(prompt=[1, "a"]), "prompt", "prompt must be text, token ids, or a list of either"),
        (COMPLETIONS, dict(prompt=""), "prompt", "prompt is empty: expected some text or token ids"),
        (COMPLETIONS, dict(prompt=[[1], []]), "prompt", "prompt is empty: expected some text or token ids"),
        (COMPLETIONS, dict(prompt=[]), "prompt", "prompt is empty: expected some text or token ids"),
        (COMPLETIONS, dict(prompt=[999]), None, "prompt 1 has token 999 and the model knows 257: they are of another model"),
        (COMPLETIONS, dict(prompt="\ud800"), None, "prompt 1 is not UTF-8 text: convert it first"),
        (COMPLETIONS, TEXT | dict(temperature="1"), "temperature", "temperature: should be a valid number, got '1'"),
        (COMPLETIONS, TEXT | dict(temperature=-1), "temperature", "temperature must be a number from 0 to 1e+06, got -1.0"),
        (COMPLETIONS, TEXT | dict(top_p=0), "top_p", "top_p must be a number above 0 and at most 1, got 0.0"),
        (COMPLETIONS, TEXT | dict(n=0), "n", "n: should be greater than or equal to 1, got 0"),
        (COMPLETIONS, TEXT | dict(n=10), None, "the request asks for 10 answers and the server takes 9 at once: ask for fewer"),
        (COMPLETIONS, TEXT | dict(stop=[""]), "stop", "a stop string is empty: expected some text"),
        (COMPLETIONS, TEXT | dict(stop=5), "stop", "stop must be text, or a list of at most 64 texts"),
        (COMPLETIONS, TEXT | dict(logit_bias={"foo": 0}), "logit_bias", "a token id of logit_bias must be a whole number, got 'foo'"),
        (COMPLETIONS, TEXT | dict(logit_bias={"999": 0}), None, "prompt 1: logit_bias has token 999 and the model knows 257: give token ids of this model"),
        (COMPLETIONS, TEXT | dict(best_of=2), "best_of", "best_of is not supported: leave it out, or give the value of n"),
        (COMPLETIONS, TEXT | dict(max_tokens=0), "max_tokens", "max_tokens must be at least 1, got 0"),
        (COMPLETIONS, TEXT | dict(echo=True, logprobs=1, stream=True), "stream", "echo with logprobs does not stream: leave stream out"),
        (COMPLETIONS, TEXT | dict(response_format={"type": "xml"}), "response_format", "response_format of type 'xml' is not supported: expected text, json_object or json_schema"),
        (COMPLETIONS, TEXT | dict(logprobs=21), "logprobs", "logprobs: should be less than or equal to 20, got 21"),
        (CHAT, dict(messages=[]), "messages", "messages must be a list of objects with a text role, a content (text, or a list of text parts) and perhaps a text reasoning, got []"),
        (CHAT, dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]), "messages", "messages: a content has a part of type 'image_url': expected text, the only type that is read"),
        (CHAT, dict(messages=MESSAGES, tools=[{"type": "function"}]), "tools", "tools[0] must be an object of type 'function' with a function"),
        (CHAT, dict(messages=MESSAGES, top_logprobs=2), "top_logprobs", "top_logprobs needs logprobs: true"),
        (CHAT, dict(messages=MESSAGES, logprobs=True, top_logprobs=21), "top_logprobs", "top_logprobs: should be less than or equal to 20, got 21"),
        (CHAT, dict(messages=MESSAGES, modalities=["audio"]), "modalities", "modalities must be ['text']: other answers are not supported"),
        (CHAT, dict(messages=MESSAGES, chat_template_kwargs={"messages": 1}), "messages", "'messages' cannot be an argument of a chat template: icejax sets it"),
        (TOKENIZE, {}, "prompt", "expected a 'prompt' or 'messages', one of them"),
        (TOKENIZE, dict(messages=[{"role": "user", "content": "\ud800"}]), None, "the text is not UTF-8: convert it first"),
        ("/detokenize", dict(tokens=[1, 999]), "tokens", "tokens has 999 and the model knows 257"),
    ],
)  # fmt: skip
def test_what_can_never_succeed_is_a_400(server, path, body, param, message):
    error = server.refusal(path, body)
    assert (error["message"], error["param"], error["type"]) == (message, param, "invalid_request_error")


@pytest.mark.parametrize(
    "body, message",
    [
        (b"", "the body is not valid JSON (Expecting value: line 1 column 1 (char 0))"),
        (b"[]", "the body must be a JSON object, got a list"),
        (b"\xff", "the body is not UTF-8"),
        (b"[" * 100_000, "the body is nested too deeply"),
        (b'{"prompt": "a", "temperature": NaN}', "the body has NaN, which is no number of JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "Exceeds the limit (4300 digits) for integer string conversion"),
    ],
)
def test_a_body_that_is_no_object_is_told(server, body, message):
    assert server.refusal(COMPLETIONS, body)["message"].startswith(message)


@pytest.mark.parametrize("field", ["prompt", "stop", "logit_bias"])
def test_a_million_faults_in_a_field_are_one(field):
    values = {str(i): "a" for i in range(10**6)} if field == "logit_bias" else [-1] * 10**6
    body = json.dumps(TEXT | {field: values}).encode()
    tracemalloc.start()
    with pytest.raises(ApiError, match=field):
        parsed(CompletionRequest, body)
    most, _ = tracemalloc.get_traced_memory()[1], tracemalloc.stop()
    assert most < 2**29  # a million errors are some GB


def test_a_prompt_that_leaves_no_room_is_told_by_its_code(server):
    error = server.refusal(COMPLETIONS, dict(prompt="a" * 300))
    told = "prompt is too long: prompt 1 has 300 tokens and the context holds 300, the answer included"
    assert error["code"] == "context_length_exceeded" and error["message"].startswith(told)
    assert server.refusal(COMPLETIONS, dict(prompt=["a", "a" * 300]))["code"] == "context_length_exceeded"
    wait_for(lambda: server.service.engine.load.running == 0)  # the first prompt is not left behind


def test_other_routes_models_and_methods_are_refused(server):
    assert server.refusal("/v1/embeddings", {}, status=404)["type"] == "not_found_error"
    assert server.refusal("/v1/models/none", None, status=404)["code"] == "model_not_found"
    assert server.refusal(COMPLETIONS, TEXT | dict(model="gpt-4"), status=404)["param"] == "model"
    assert server.refusal(COMPLETIONS, None, status=405)["message"] == "Method Not Allowed"
    response = server.send(COMPLETIONS, method="OPTIONS", Origin="http://evil.example")
    assert response.status == 403 and response.headers["access-control-allow-origin"] is None


def test_a_long_body_is_not_read(server):
    limit = server.service.body_limit
    assert limit == 16 * 300 + 2**20
    with socket.create_connection(("127.0.0.1", server.port)) as client:  # announced
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 413 ")
    with socket.create_connection(("127.0.0.1", server.port)) as client:  # not announced
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(limit // 2**16 + 1):
            client.sendall(b"10000\r\n" + b" " * 2**16 + b"\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 413 ")
    body = json.dumps(TEXT).encode()
    assert server.ask(COMPLETIONS, body + b" " * (limit - len(body)))["choices"]


def test_a_full_queue_is_told_when_to_come_again(server):
    streams = [server.send(COMPLETIONS, TEXT | dict(n=3, max_tokens=20, ignore_eos=True, stream=True)) for _ in range(3)]
    response = server.send(COMPLETIONS, TEXT)
    assert (response.status, response.headers["retry-after"]) == (429, "1")
    assert json.loads(response.read())["error"]["message"] == "6 answers wait already, as many as may: try again later"
    assert 'vllm:admission_rejections_total{model_name="bundled"} 1.0' in server.send("/metrics").read().decode()
    for stream in streams:
        stream.read()
    assert server.ask(COMPLETIONS, TEXT)


def aborted(server) -> float:
    """Returns how many answers have ended because their clients left."""
    text = server.send("/metrics").read().decode()
    return float(re.search(r'vllm:request_success_total\{finished_reason="abort",model_name="bundled"\} (\S+)', text)[1])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(server, stream):
    engine, body = server.service.engine, TEXT | dict(n=3, max_tokens=200, ignore_eos=True, stream=stream)
    before = aborted(server)
    connection = server.connect()
    connection.request("POST", COMPLETIONS, json.dumps(body))
    wait_for(lambda: engine.load.running == 3)
    connection.sock.close()
    if stream:
        connection.close()
    wait_for(lambda: engine.load.running == 0 and server.service.open_answers == 0)
    assert aborted(server) > before
    assert server.ask(COMPLETIONS, TEXT)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=6,
)
KNOWN = {
    "prompt": st.sampled_from(["a", ["a", "b"], [97], [[97], [98]], [-1], "\ud800"]),
    "messages": st.just(MESSAGES) | st.lists(st.fixed_dictionaries({"role": st.text(max_size=5), "content": JSON}), max_size=2),
    "max_tokens": st.integers(-1, 3),
    **dict.fromkeys(["n", "best_of", "top_k", "logprobs", "top_logprobs"], st.integers(-2, 4) | st.booleans()),
    **dict.fromkeys(["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"], st.floats(-3, 3)),
    "stop": st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=3),
    "seed": st.integers(),
    "logit_bias": st.dictionaries(st.text("0123456789x", max_size=4), st.floats(-200, 200), max_size=3),
    "stream_options": st.dictionaries(st.sampled_from(["include_usage", "continuous_usage_stats"]), JSON),
    **dict.fromkeys(["echo", "stream", "ignore_eos", "parse_special", "add_special_tokens"], st.booleans()),
    "input": st.lists(
        st.dictionaries(st.sampled_from(["type", "role", "content", "output", "call_id", "summary"]), JSON), max_size=3
    ),
    **dict.fromkeys(["instructions", "max_output_tokens", "reasoning", "include", "metadata", "truncation"], JSON),
    **dict.fromkeys(["tools", "tool_choice", "response_format", "chat_template_kwargs", "user", "suffix", "tokens"], JSON),
}
ONE = st.sampled_from([*KNOWN]).flatmap(lambda name: st.tuples(st.just(name), KNOWN[name] | JSON))
CHANGES = st.lists(ONE, max_size=4).map(dict) | JSON.filter(lambda value: value is not None)
VALID = {
    COMPLETIONS: dict(prompt="a", max_tokens=2),
    CHAT: dict(messages=MESSAGES, max_tokens=2),
    TOKENIZE: dict(prompt="a"),
    "/detokenize": dict(tokens=[97]),
    RESPONSES: dict(input="a", max_output_tokens=2),
}


TOGETHER = 5  # bodies that are sent at once
ASKED = st.tuples(st.sampled_from([*VALID]), CHANGES)


def check_fuzzed(server, count: int, capfd) -> None:
    statuses = {200: 0, 400: 0}

    def answered(asked) -> tuple[int, bytes]:
        path, changes = asked
        response = server.send(path, VALID[path] | changes if isinstance(changes, dict) else changes)
        return response.status, response.read()

    @settings(max_examples=count // TOGETHER, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(ASKED, min_size=TOGETHER, max_size=TOGETHER))
    def run(bodies):
        for status, text in threads.map(answered, bodies):
            assert status in statuses, (status, text)
            statuses[status] += 1

    with ThreadPoolExecutor(TOGETHER) as threads:
        run()
    assert sum(statuses.values()) >= count and min(statuses.values()) > count / 20 and not server.errors, statuses
    wait_for(lambda: server.service.open_answers == 0 and server.service.engine.load.running == 0)
    assert "Traceback" not in capfd.readouterr().err


def test_no_body_makes_the_server_fail(server, capfd):
    check_fuzzed(server, 40, capfd)


@pytest.mark.slow
def test_ten_thousand_bodies_make_it_not_fail(narrow, capfd):
    service = Service(names=("narrow",), root="here", places=SIZES["batch_size"], max_queue=8 * TOGETHER)
    with live(service, lambda: (*narrow, icejax.Engine(*narrow, cache=icejax.Full(), **SIZES))) as server:
        check_fuzzed(server, 10_000, capfd)
