"""Two servers behind `sglang-router`, as docs/how-to/serve.md sets them up: the questions about a document go to one server."""

import http.client
import json
import socket
import subprocess
import sys
import urllib.request

import pytest

import icejax
from tests.helpers.server import live, wait_for

pytestmark = pytest.mark.slow
DOCUMENTS = ["".join(f"{name}{number} = {number}\n" for number in range(60)) for name in ("left", "right")]
SIZES = dict(batch_size=2, context_length=1024, max_new_tokens=8)


@pytest.fixture
def servers(narrow):
    from icejax.serving.service import Service

    def server():
        return live(
            Service(names=("narrow",), root="here", places=2),
            lambda: (*narrow, icejax.Engine(*narrow, cache=icejax.Full(), **SIZES)),
        )

    with server() as first, server() as second:
        yield [first, second]


@pytest.fixture
def router(servers, tmp_path):
    """The port of a router before the servers."""
    pytest.importorskip("sglang_router")
    with socket.socket() as free, socket.socket() as other:
        free.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, metrics = free.getsockname()[1], other.getsockname()[1]
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *(f"http://127.0.0.1:{server.port}" for server in servers), "--prometheus-port", str(metrics)]
    command += ["--policy", "manual", "--assignment-mode", "min_group"]
    with open(tmp_path / "log", "w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            wait_for(lambda: process.poll() is not None or _is_ready(port))
            assert process.poll() is None, (tmp_path / "log").read_text()
            yield port
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_ready(port: int) -> bool:
    """Whether the router knows both servers; before, it sends all to the first that it has found."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/workers", timeout=5) as response:
            return [worker["is_healthy"] for worker in json.load(response)["workers"]] == [True] * 2
    except OSError:
        return False


def ask(port: int, document: str, question: str, **fields) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = json.dumps(dict(model="narrow", prompt=f"{document}# {question}", max_tokens=4, temperature=0) | fields)
    headers = {"Content-Type": "application/json", "X-SMG-Routing-Key": document[:5]}
    connection.request("POST", "/v1/completions", body, headers)
    response = connection.getresponse()
    text = response.read()
    assert response.status == 200, text
    return text


def test_a_document_stays_on_the_server_that_has_its_cache(router, servers):
    cached = {document: [] for document in DOCUMENTS}
    for question in ("a", "b", "c"):
        for document in DOCUMENTS:
            usage = json.loads(ask(router, document, question))["usage"]
            cached[document].append(usage["prompt_tokens_details"]["cached_tokens"])
    for first, *later in cached.values():
        assert first == 0 and min(later) > 0.9 * 600, cached
    asked = [server.service.metrics.text(server.service.engine.load).decode() for server in servers]
    counts = [
        text.split('vllm:request_success_total{finished_reason="length",model_name="narrow"} ')[1].split()[0] for text in asked
    ]
    assert counts == ["3.0", "3.0"]  # a document each
    stream = ask(router, DOCUMENTS[0], "d", stream=True)
    assert stream.endswith(b"data: [DONE]\n\n") and stream.count(b"data: {") == 4
