"""Clients that send nothing, slowly, too much or garbage, or do not read: none holds a place, and others are answered."""

import contextlib
import json
import logging
import re
import socket
import threading
import time

import pytest

from icejax.serving import connections, guard
from icejax.serving.service import Service
from tests.helpers.server import live, wait_for
from tests.serving.test_lifecycle import BODY, COMPLETIONS, MODEL, Engine, piece

SLOW = pytest.mark.slow  # a sibling tests nearly the same by default
GET = b"GET /version HTTP/1.1\r\nHost: a\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
VERSION = b'{"version":'


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def server(engine, monkeypatch):
    """A server whose limits are a fraction of a second."""
    monkeypatch.setattr(connections, "HEADERS_S", 0.4)
    monkeypatch.setattr(connections, "READ_S", 0.4)
    monkeypatch.setattr(guard, "BODY_S", 0.4)
    with live(Service(names=("m",), root="m"), lambda: (MODEL, None, engine)) as server:
        yield server
        assert server.ask("/version") and server.errors == []


def connected(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def told(client: socket.socket) -> bytes:
    """Returns all that the server sends until it closes the connection."""
    data = b""
    try:
        while part := client.recv(2**16):
            data += part
    except ConnectionError:
        pass
    return data


def dripped(client: socket.socket, data: bytes) -> bytes:
    """Sends data byte by byte, the last one again and again, and returns what the server sends until it closes."""
    try:
        for i in range(10_000):
            client.sendall(data[min(i, len(data) - 1) :][:1])
            time.sleep(0.02)
    except ConnectionError:
        return told(client)
    raise AssertionError("the server continues reading")


@pytest.mark.parametrize(
    "sent, expected",
    [
        pytest.param(b"", b"", marks=SLOW),
        (GET, b""),
        pytest.param(GET + b"\r\n", VERSION, marks=SLOW),
        (POST + b"Content-Length: 20\r\n\r\n{", b"HTTP/1.1 408 "),
        pytest.param(POST + b"Content-Length: 4\r\n\r\n[1", b"HTTP/1.1 408 ", marks=SLOW),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab", b"HTTP/1.1 408 "),
        pytest.param(b"GET /version HTTP/1.1\r\nContent-Length: 9\r\nHost: a\r\n\r\n", VERSION, marks=SLOW),
    ],
    ids=["nothing", "half headers", "one request", "half body", "almost a body", "half chunk", "no body that was announced"],
)
def test_a_client_that_goes_silent_is_cut(server, sent, expected):
    with connected(server) as client:
        client.sendall(sent)
        data = told(client)
        assert expected in data if expected else data == b""


@pytest.mark.parametrize(
    "data, expected",
    [(GET + b"X-A: " + b"a", b""), (POST + b"Content-Length: 90000\r\n\r\n{" + b" ", b"")],
    ids=["headers", "body"],
)
def test_a_client_that_drips_is_cut(server, data, expected):
    started = time.monotonic()
    with connected(server) as client:
        dripped(client, data)
    assert time.monotonic() - started < 15 and server.service.open_answers == 0


def test_requests_one_after_another_are_not_cut(server):
    """The time starts from zero behind each answer."""
    with connected(server) as client:
        for _ in range(4):
            client.sendall(GET + b"\r\n")
            answer = b""
            while VERSION not in answer and (data := client.recv(2**16)):
                answer += data
            assert VERSION in answer
            time.sleep(0.2)


def test_an_answer_that_takes_long_is_not_cut(server, engine):
    response = []
    thread = threading.Thread(target=lambda: response.append(server.ask(COMPLETIONS, BODY)))
    thread.start()
    wait_for(lambda: engine.handles)
    time.sleep(1)
    engine.handles[0].give(piece("one", "stop"))
    thread.join(20)
    assert response[0]["choices"][0]["text"] == "one"


def test_a_client_that_does_not_read_is_cut(server, engine):
    """Its request ends in the engine."""
    with connected(server) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps(BODY | dict(stream=True)).encode()
        client.sendall(POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: engine.handles)
        for _ in range(100):
            engine.handles[0].give(piece("x" * 2**17))
        wait_for(lambda: engine.handles[0].cancelled)
        engine.handles[0].give(None)
        wait_for(lambda: server.service.open_answers == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_sends_no_more_ends_its_request(server, engine, stream):
    with connected(server) as client:
        body = json.dumps(BODY | dict(stream=stream)).encode()
        client.sendall(POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: engine.handles)
        client.shutdown(socket.SHUT_WR)
        wait_for(lambda: engine.handles[0].cancelled)
        engine.handles[0].give(None)
        wait_for(lambda: server.service.open_answers == 0)


@pytest.mark.parametrize(
    "garbage, statuses",
    [
        pytest.param(b"\0" * 1000, [400], marks=SLOW),
        pytest.param(b"GET\r\n\r\n" * 50, [400], marks=SLOW),
        pytest.param(GET + b"\r\n" + b"\xff" * 5000, [200], marks=SLOW),
        ((GET + b"\r\n") * 20 + b"no HTTP\r\n\r\n", [200] * 20 + [400]),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nnot a size\r\n", [400]),
        pytest.param(POST + b"Content-Length: -1\r\n\r\n", [400], marks=SLOW),
        pytest.param(GET + b"X: " + b"a" * 2**17, [400], marks=SLOW),
        (GET + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nrest\r\n", [400]),
    ],
    ids=["zeros", "no version", "behind a request", "behind twenty", "chunks", "length", "long header", "behind a body"],
)
def test_garbage_ends_its_own_connection_alone(server, garbage, statuses, caplog, capfd):
    with connected(server) as client:
        client.sendall(garbage)
        data = told(client)
    assert [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", data)] == statuses
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())


def test_more_connections_than_files_are_refused(server, monkeypatch):
    monkeypatch.setattr(connections, "most_connections", lambda: 3)
    clients = [connected(server) for _ in range(6)]
    for client in clients:
        with contextlib.suppress(ConnectionError):
            client.sendall(GET + b"\r\n")
    assert sum(VERSION in told(client) for client in clients) == 3
    for client in clients:
        client.close()


@pytest.mark.slow
def test_two_thousand_idle_connections_stop_nobody(server, monkeypatch):
    monkeypatch.setattr(connections, "HEADERS_S", 30.0)
    clients = [connected(server) for _ in range(2000)]
    assert server.ask("/health")["status"] == "ok"
    for client in clients:
        client.close()


@pytest.mark.slow
@pytest.mark.parametrize("header", [b"Content-Length: 1000000000", b"Transfer-Encoding: chunked"])
def test_a_gigabyte_is_not_read(engine, header, caplog):
    """The client sends on behind the refusal; meanwhile others are answered."""
    caplog.set_level(logging.DEBUG)
    with live(Service(names=("m",), root="m"), lambda: (MODEL, None, engine)) as server, connected(server) as client:
        client.sendall(POST + header + b"\r\n\r\n")
        part = b" " * 2**20 if b"Length" in header else b"100000\r\n" + b" " * 2**20 + b"\r\n"
        try:
            for i in range(950):
                client.sendall(part)
                if i % 100 == 0:
                    assert server.ask("/health")["status"] == "ok"
        except ConnectionError:
            pass
        client.settimeout(5)
        assert client.recv(2**12).startswith(b"HTTP/1.1 413 ")
        assert server.ask("/health")["status"] == "ok" and not engine.asked
