"""The life of a server, with engines that are made up: loading, keys, hosts, draining, failures, and what the log tells."""

import dataclasses
import gc
import json
import logging
import socket
import threading
import weakref
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from icejax.checks.errors import InputError
from icejax.engine.response import GenerationResponse
from icejax.engine.serving.scheduler import Load
from icejax.serving.errors import ApiError
from icejax.serving.guard import Guard, read_body
from icejax.serving.lifecycle import Server
from icejax.serving.service import Phase, Service
from icejax.serving.warm import warm_up
from tests.helpers.server import live, wait_for

COMPLETIONS, BODY = "/v1/completions", dict(prompt="secret prompt", max_tokens=2)
MODEL = SimpleNamespace(config=SimpleNamespace(eos_token_ids=(), vocab_size=257))


class Handle:
    """A handle of an answer that the test gives."""

    def __init__(self) -> None:
        self.listener, self.cancelled = None, False

    def listen(self, listener) -> None:
        self.listener = listener

    def cancel(self) -> None:
        self.cancelled = True

    def give(self, piece) -> None:
        wait_for(lambda: self.listener is not None)
        self.listener(piece)


class Engine:
    """An engine whose handles are those that the test has prepared."""

    def __init__(self) -> None:
        self.context_length, self.max_new_tokens = 100, 10
        self.failure, self.load, self.closed, self.handles, self.asked = None, Load(), False, [], []

    def submit(self, prompt, **options) -> Handle:
        self.asked.append((prompt, options))
        self.handles.append(Handle())
        return self.handles[-1]

    def close(self) -> None:
        self.closed = True


def piece(text: str = "", reason: str | None = None) -> GenerationResponse:
    fields = dict.fromkeys(field.name for field in dataclasses.fields(GenerationResponse))
    fields |= dict(prompt_tokens=3, cached_tokens=0, new_tokens=1, prefill_tps=1.0, ttft_s=0.1, sample=0, row=0, token_ids=(1,))
    return GenerationResponse(**fields | dict(text=text, finish_reason=reason))


@pytest.fixture
def engine() -> Engine:
    return Engine()


def served(engine: Engine, **options):
    return live(Service(names=("m",), root="m", **options), lambda: (MODEL, None, engine))


def test_a_server_that_loads_answers_health_alone():
    loads, service = threading.Event(), Service(names=("m",), root="m")

    def start():
        assert loads.wait(20)
        raise InputError("the model is broken")

    with_server = live(service, start)
    thread = threading.Timer(1, loads.set)
    service.phase = Phase.DRAINING  # so that `live` does not wait
    with with_server as server:
        service.phase = Phase.LOADING
        assert server.ask("/health", status=503) == {"status": "loading"}
        for path, body in ((COMPLETIONS, BODY), ("/v1/models", None), ("/metrics", None), ("/tokenize", {})):
            assert server.refusal(path, body, status=503)["code"] == "loading"
        thread.start()
        server.thread.join(20)
    assert [str(error) for error in server.errors] == ["the model is broken"]


def test_a_key_is_asked_for_everywhere_but_on_two_routes(engine):
    with served(engine, keys=("first-key", "other")) as server:
        for path in (COMPLETIONS, "/v1/chat/completions", "/v1/models", "/tokenize", "/nothing", "/version"):
            for headers in ({}, dict(Authorization="Bearer no"), dict(Authorization="first-key"), dict(x_api_key="first")):
                response = server.send(path, {}, **headers)
                assert (response.status, response.headers["www-authenticate"]) == (401, "Bearer")
                assert b"first-key" not in response.read()
        assert server.ask("/health")["status"] == "ok" and server.send("/metrics").status == 200
        assert server.ask("/v1/models", Authorization="Bearer first-key")["data"][0]["id"] == "m"
        assert server.ask("/v1/models", x_api_key="first-key")["data"][0]["max_model_len"] == 100


def test_callers_with_other_keys_share_no_cache(engine):
    with served(engine, keys=("a", "b")) as server:
        for key, salt in (("a", None), ("b", None), ("a", "x"), ("a", None)):
            server.send(COMPLETIONS, BODY | dict(cache_salt=salt, stream=True), Authorization=f"Bearer {key}")
            engine.handles[-1].give(piece("x", "stop"))
    salts = [options["cache_salt"] for _, options in engine.asked]
    assert len({*salts}) == 3 and salts[0] == salts[3] and not any("Bearer" in salt for salt in salts)


def test_a_server_without_keys_is_asked_by_its_own_machine_alone(engine):
    """Behind Ray Serve's proxy the service has no socket, so that the address is the client's only sign."""
    request = Request(dict(type="http", headers=[(b"host", b"localhost")], path="/v1/models", client=("10.0.0.9", 5)))
    guard = Guard(None, SimpleNamespace(hosts=("localhost",), keys=()))
    with pytest.raises(ApiError, match="only this machine may ask a server without keys: start it with --api-key"):
        guard._check(request)
    for client in (("127.0.0.1", 5), ("::1", 5), None):
        request.scope["client"] = client
        guard._check(request)


def test_pages_of_other_sites_and_names_are_refused(engine):
    with served(engine, hosts=("127.0.0.1", "localhost")) as server:
        assert server.ask("/v1/models")["data"]
        assert server.ask("/v1/models", Host=f"LOCALHOST:{server.port}")["data"]
        for host in ("[::1", "[::2]:80", ":80", "127.0.0.1.evil.example"):
            server.refusal("/v1/models", None, status=403, Host=host)
        error = server.refusal("/v1/models", None, status=403, Host="evil.example")
        assert error["message"] == "the server is known as 127.0.0.1 or localhost alone: use that name, or --api-key"
        assert server.refusal(COMPLETIONS, BODY, status=403, Origin="http://evil.example")["type"] == "permission_error"
        assert server.ask("/v1/models", Origin=f"http://127.0.0.1:{server.port}")["data"]
    assert engine.asked == []
    with served(engine, keys=("sk-1",)) as server:  # no browser adds a key by itself, and a proxy may change the Host
        origin = dict(Origin="https://chat.example")
        assert server.ask("/v1/models", Authorization="Bearer sk-1", **origin)["data"]
        server.refusal(COMPLETIONS, BODY, status=401, **origin)


def test_answers_that_run_come_to_their_end_while_the_server_drains(engine):
    answers = []
    with served(engine) as server:
        thread = threading.Thread(target=lambda: answers.append(server.ask(COMPLETIONS, BODY)))
        thread.start()
        wait_for(lambda: engine.handles)
        engine.handles[0].give(piece("on"))
        server.server.drain()
        wait_for(lambda: server.service.phase is Phase.DRAINING)
        assert server.refusal(COMPLETIONS, BODY, status=503)["message"] == "the server is draining: try again later"
        assert server.ask("/health", status=503)["status"] == "draining" and not engine.closed
        engine.handles[0].give(piece("e", "stop"))
        thread.join(20)
        server.thread.join(20)
    assert answers[0]["choices"][0]["text"] == "one" and engine.closed and server.errors == []


def test_a_body_that_ends_while_the_server_drains_is_refused(engine, monkeypatch):
    begun, body = threading.Event(), json.dumps(BODY).encode()

    async def reading(request):
        begun.set()
        return await read_body(request)

    monkeypatch.setattr("icejax.serving.routes.completions.read_body", reading)
    with served(engine) as server, socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode())
        assert begun.wait(60)
        server.server.drain()
        wait_for(lambda: server.service.phase is Phase.DRAINING)
        client.sendall(body)
        assert client.makefile("rb").readline().split()[1] == b"503"
        server.thread.join(20)
    assert engine.asked == [] and server.errors == []


@pytest.mark.parametrize("streams", [True, False])
def test_nothing_is_left_of_a_request_whose_client_has_gone(engine, streams):
    with served(engine) as server:
        connection = server.connect()
        connection.request("POST", COMPLETIONS, json.dumps(BODY | dict(stream=streams)), {"Content-Type": "application/json"})
        wait_for(lambda: engine.handles and engine.handles[0].listener)
        connection.close()
        wait_for(lambda: engine.handles[0].cancelled)
        engine.handles[0].give(None)
        handle = weakref.ref(engine.handles.pop())
        engine.asked.clear()
        server.refusal("/v1/none", None, status=404)  # a later request

        def is_gone() -> bool:
            gc.collect()
            return handle() is None

        wait_for(is_gone)


def test_an_answer_that_takes_too_long_is_cut(engine, caplog):
    with live(Service(names=("m",), root="m"), lambda: (MODEL, None, engine), drain_s=0.1) as server:
        stream = server.send(COMPLETIONS, BODY | dict(stream=True))
        server.server.drain()
        wait_for(lambda: engine.handles[0].cancelled)
        engine.handles[0].give(None)
        server.thread.join(20)
        assert not server.thread.is_alive() and stream.read().startswith(b": ")
    assert "1 answers are cut" in caplog.text


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_fails_ends_the_server(engine, stream, caplog):
    with served(engine) as server:
        response = []
        thread = threading.Thread(target=lambda: response.append(server.send(COMPLETIONS, BODY | dict(stream=stream)).read()))
        thread.start()
        wait_for(lambda: engine.handles)
        engine.failure = ValueError("no memory")
        engine.handles[0].give(RuntimeError("the engine has failed: no memory"))
        thread.join(20)
        server.thread.join(20)
    assert b'"the engine has ended: the server stops"' in response[0]
    assert [str(error) for error in server.errors] == ["the engine has failed: no memory"]
    assert server.service.phase is Phase.FAILED and "secret" not in caplog.text


def test_an_engine_that_fails_while_nobody_asks_ends_the_server(engine, monkeypatch):
    monkeypatch.setattr("icejax.serving.lifecycle.LOOK_S", 0.01)
    with served(engine) as server:
        engine.failure = ValueError("no memory")
        server.thread.join(20)
    assert [str(error) for error in server.errors] == ["the engine has failed: no memory"]


def test_an_engine_that_failed_unseen_is_seen_by_health(engine, monkeypatch):
    monkeypatch.setattr("icejax.serving.lifecycle.LOOK_S", 1000.0)
    with served(engine) as server:
        engine.failure = ValueError("no memory")
        assert server.ask("/health", status=503)["status"] == "failed"
        server.thread.join(20)
    assert len(server.errors) == 1


def test_an_unexpected_error_is_a_500_without_a_traceback(engine, caplog, capfd):
    engine.submit = lambda *_, **__: {}["secret prompt"]
    with served(engine) as server:
        error = server.refusal(COMPLETIONS, BODY, status=500)
        assert error["message"] == "the server failed on this request (KeyError)" and server.ask("/health")
    assert "a request failed: KeyError" in caplog.text
    told = caplog.text + "".join(capfd.readouterr())
    assert "secret" not in told and "Traceback" not in told


def test_a_stream_that_waits_sends_comments(engine, monkeypatch):
    monkeypatch.setattr("icejax.serving.streaming.PATIENCE_S", 0.02)
    with served(engine) as server:
        response = server.send(COMPLETIONS, BODY | dict(stream=True))
        assert b"".join(response.readline() for _ in range(6)) == b": the request waits\n\n" * 3
        engine.handles[0].give(InputError("the logits are not finite"))
        *_, event, end = response.read().split(b"\n\n")
    assert end == b"" and event.startswith(b'data: {"error":{"message":"the logits are not finite"')


def test_neither_keys_nor_prompts_are_logged(engine, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    with served(engine, keys=("sk-very-secret",)) as server:
        server.send(COMPLETIONS, BODY, Authorization="Bearer sk-very-wrong").read()
        server.send(COMPLETIONS, BODY | dict(n="x"), Authorization="Bearer sk-very-secret").read()
        server.send("/v1/models?key=sk-very-secret", Authorization="Bearer sk-very-secret").read()
    told = caplog.text + "".join(capfd.readouterr())
    assert "secret" not in told and "sk-very" not in told


def test_an_address_that_is_in_use_or_none_is_told():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"127.0.0.1, port {port} cannot be used: Address already in use"):
            Server(Service(names=("m",), root="m"), host="127.0.0.1", port=port, drain_s=1)
    with pytest.raises(InputError, match="--host 1.2.3 .4 is no address"):
        Server(Service(names=("m",), root="m"), host="1.2.3 .4", port=0, drain_s=1)


def test_a_warm_up_has_a_prompt_of_every_size_and_rows_of_every_kind():
    asked, told, compiled, reads = [], [], [], True

    def submit(request, **options):
        kind = request.sampling, request.logprobs, request.grammar
        asked.append((len(request.prompt), options["cache_salt"], *kind, request.prompt[-1], request.explain))
        if request.grammar is not None and not reads:
            raise InputError("llguidance cannot read the tokenizer")
        return SimpleNamespace(result=lambda: None)

    sizes = dict(context_length=700, max_new_tokens=5, step_sizes=(1, 2, 3), can_explain=True, prefill_share=0.7)
    sizes |= dict(compile_for=lambda size: compiled.append((size, len(asked))))
    warm_up(SimpleNamespace(submit=submit, **sizes), tokens=600, tell=lambda *x: told.append(x))
    assert compiled == [(3, 0), (2, 20), (1, 29)]
    assert asked[20:29] == asked[29:] == [*asked[:5], *asked[16:20]]
    assert told[-1] == (38, 38)
    del asked[20:]
    assert [size for size, *_ in asked] == [*[256] * 6, 256, 384, 512, 600, 256, 272, 288, 320, 384, 512, *[256] * 4]
    assert [place for place, kind in enumerate(asked) if kind[6]] == [6, 7, 8, 9]
    salts = [salt for _, salt, *_ in asked]
    assert len({*salts[6:11]}) == 5 and len({*salts[10:]}) == 1
    assert len({kind[5] for kind in asked[10:16]}) == 6  # of the texts behind a prefix none begins with another one
    assert [kind[2:4] for kind in asked[:4]] == [kind[2:4] for kind in asked[-4:]] and asked[-5][4] is None != asked[-1][4]
    reads = False
    asked.clear()
    warm_up(SimpleNamespace(submit=submit, **sizes), tokens=600, tell=lambda *x: told.append(x))
    assert len(asked) == 17 + 2 * 5 and told[-1] == (38, 38)
    asked.clear()
    warm_up(SimpleNamespace(submit=submit, **sizes | dict(prefill_share=1.0)), tokens=600)
    assert [kind[6] for kind in asked[6:14]] == [True, False] * 4  # a prefill in one piece is another program
    asked.clear()
    warm_up(SimpleNamespace(submit=submit, **sizes | dict(can_explain=False)), tokens=600)
    assert not any(kind[6] for kind in asked)
    asked.clear()
    compiled.clear()
    warm_up(SimpleNamespace(submit=submit, **sizes), tokens=0)
    assert asked == compiled == []
