"""A Ray cluster of two nodes on this machine: every line is answered once, a document has one replica, and the router."""

import asyncio
import http.client
import json
import os
import pickle
import socket
import subprocess
import sys
import time
import types

import psutil
import pytest

import icejax
from icejax.cache.registry import Full

pytest.importorskip("ray", reason="needs Ray: pip install 'icejax[ray]'")
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.data.exceptions import ExecutionTimeoutError
from ray.serve.exceptions import BackPressureError

from icejax.commands import evaluate, generate
from icejax.ray import jobs, router, serving

pytestmark = pytest.mark.slow
LINES, TOKENS, WAIT_S = 8, 3, 300
PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def cluster():
    """A cluster whose nodes have a core each."""
    # Workers as fast as the test, and no more of them than it needs.
    environment = {"RAY_worker_niceness": "0", "RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
    os.environ |= environment
    # With ports of its own a node need not wait for its agents, which take longer than it waits on a busy machine.
    nodes = [{"num_cpus": 1, "object_store_memory": 2**27} | {name: free_port() for name in PORTS} for _ in range(2)]
    cluster = Cluster(initialize_head=True, head_node_args=nodes[0] | {"include_dashboard": False})
    try:
        cluster.add_node(**nodes[1])
        yield cluster
    finally:
        cluster.shutdown()
        for name in environment:
            del os.environ[name]


def workers() -> list[psutil.Process]:
    """The processes that answer lines; Ray names a process after its actor."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            found += [process] if "MapWorker" in " ".join(process.cmdline()) else []
        except psutil.NoSuchProcess:
            continue
    return found


def test_a_worker_that_is_killed_costs_no_line_and_none_comes_twice(cluster, tmp_path, bundled):
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    texts = [f"import os\nx{i} = {i}\n" for i in range(LINES)]
    prompts.write_text("".join(json.dumps({"id": i, "prompt": text}) + "\n" for i, text in enumerate(texts)))
    line = [sys.executable, "-m", "icejax", "generate", "-f", str(prompts), "-o", str(answers), "--ray", cluster.address]
    line += ["--cache", "full", "--batch-size", "1", "-n", str(TOKENS), "--compile-cache", "none"]
    command = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
    end = time.monotonic() + WAIT_S
    try:
        while not (answers.exists() and answers.read_text().count("\n") >= 2):
            assert command.poll() is None and time.monotonic() < end, command.stderr.read() if command.poll() else "no answers"
            time.sleep(0.05)
        workers()[0].kill()
        killed_at = answers.read_text().count("\n")
        assert command.wait(WAIT_S) == 0, command.stderr.read()
    finally:
        command.kill()
    assert killed_at < LINES
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted(line["line"] for line in found) == list(range(1, LINES + 1))
    expected = icejax.generate(*bundled, texts, cache=Full(), batch_size=1, max_new_tokens=TOKENS)
    assert {line["id"]: line["token_ids"] for line in found} == {i: list(r.token_ids) for i, r in enumerate(expected)}


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder with a task of two samples, of which the bundled model answers one."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    key = "Pass key tb:94864.\nPass key tb:"
    (tmp_path / "keys.jsonl").write_text("".join(json.dumps(dict(text=key, answer=a)) + "\n" for a in ("94864.", "1")))
    task = dict(task="keys", dataset_path="json", output_type="generate_until", test_split="test")
    task |= dict(dataset_kwargs=dict(data_files=dict(test=str(tmp_path / "keys.jsonl"))), doc_to_text="{{text}}")
    task |= dict(doc_to_target="{{answer}}", generation_kwargs=dict(until=["\n"], max_gen_toks=8))
    (tmp_path / "keys.yaml").write_text(json.dumps(task | dict(metric_list=[dict(metric="exact_match")])))
    return tmp_path


def test_an_evaluation_has_its_answers_from_the_cluster(cluster, tasks, monkeypatch):
    pytest.importorskip("lm_eval")
    from icejax.evaluation import harness

    monkeypatch.setattr(harness, "stream_generate", None)  # a call would fail
    line = ["--tasks", "keys", "--include-path", str(tasks), "-o", str(tasks / "scores"), "--cache", "full", "--ray"]
    line += [cluster.address, "--ray-workers", "1", "--context-length", "256", "--compile-cache", "none", "--quiet"]
    assert evaluate.main(line, name="icejax evaluate") == 0
    scores = json.loads((tasks / "scores" / "full" / "results.json").read_text())
    assert scores["results"]["keys"]["exact_match,none"] == 0.5


def test_what_a_worker_refuses_is_told_in_one_line(cluster, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "too long for four tokens"}\n')
    line = ["-f", str(tmp_path / "prompts.jsonl"), "-o", str(tmp_path / "answers.jsonl"), "-c", "4", "--ray", cluster.address]
    assert generate.main([*line, "--compile-cache", "none"], name="icejax generate") == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert (
        told.startswith("icejax generate: error: prompt 1 has at least 16 tokens and the context holds 4")
        and not (tmp_path / "answers.jsonl").read_text()
    )


@pytest.mark.parametrize("address", ["127.0.0.1:{free}", "nowhere", "127.0.0.1:x", "[::1]:70000"])
def test_an_address_without_a_cluster_is_refused_at_once(tmp_path, capsys, address):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    address = address.format(free=free_port())
    line = ["-f", str(tmp_path / "prompts.jsonl"), "-o", str(tmp_path / "answers.jsonl"), "--ray", address]
    assert generate.main(line, name="icejax generate") == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"icejax generate: error: --ray {address} is no Ray cluster (")
    assert told.endswith("): expected HOST:PORT, auto or local")


REPLICAS = ["first", "second", "third"]


def test_a_document_has_one_replica_and_moves_only_if_that_goes():
    documents = [router.document_of(json.dumps({"prompt": f"document {i}"}).encode()) for i in range(300)]
    first = {document: router.ranked(document, REPLICAS)[0] for document in documents}
    assert {name: 70 < list(first.values()).count(name) < 130 for name in REPLICAS} == dict.fromkeys(REPLICAS, True)
    for document, name in first.items():
        assert sorted(router.ranked(document, REPLICAS[::-1])) == sorted(REPLICAS)
        assert router.ranked(document, REPLICAS[::-1])[0] == name  # whatever order the router knows them in
        left = router.ranked(document, [other for other in REPLICAS if other != "second"])
        assert left[0] == (router.ranked(document, REPLICAS)[1] if name == "second" else name)


def test_the_first_part_of_a_prompt_names_its_document():
    text = "x" * router.HEAD
    named = [
        router.document_of(json.dumps(body).encode())
        for body in (
            {"messages": [{"role": "user", "content": text + "a"}]},
            {"messages": [{"role": "user", "content": text + "b"}, {"role": "user", "content": "c"}], "temperature": 1},
            {"prompt": "y" + text},
            {"prompt": text, "stream": True},
        )
    ]
    assert named[0] == named[1] and len(set(named)) == 3 and all(named)
    assert [router.document_of(body) for body in (b"", b"{", b"[1]", b'{"model": "a"}')] == [""] * 4


def test_options_of_the_server_are_checked_before_anything_starts():
    for options, message in (
        ({"port": 1}, "port is Ray Serve's"),
        ({"processes": 2}, "processes is for one model over several processes, and a replica is one: leave it out"),
        ({"replicas": 0}, "replicas must be at least 1, got 0"),
        ({"slots": 0}, "--slots must be at least 1, got 0"),
    ):
        with pytest.raises(icejax.InputError, match=message):
            serving.server(options)


@pytest.mark.parametrize(
    "share, asked, count",
    [
        (dict(num_gpus=2), None, 3),  # of a machine with five and one with three
        (dict(num_gpus=2), 1, 1),
        (dict(num_gpus=8), None, "a machine has at most 5 GPUs and a model needs 8: lower --mesh"),
        (dict(num_gpus=8), 1, "a machine has at most 5 GPUs and a model needs 8: lower --mesh"),
        (dict(num_cpus=1), None, 2),
    ],
)
def test_an_actor_has_the_devices_of_one_machine(monkeypatch, share, asked, count):
    nodes = [dict(Alive=True, Resources=dict(CPU=1, GPU=5)), dict(Alive=True, Resources=dict(CPU=1, GPU=3))]
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, dict(Alive=False, Resources=dict(GPU=8, CPU=8))])
    arguments = types.SimpleNamespace(ray_workers=asked)
    if isinstance(count, int):
        assert jobs._workers(arguments, share) == count
    else:
        with pytest.raises(icejax.InputError, match=count):
            jobs._workers(arguments, share)


def test_answers_before_a_refusal_are_not_lost():
    class Refuses(jobs.Worker):
        def start(self, arguments):
            pass

        def answer(self, rows):
            yield rows[0]
            raise icejax.InputError("the second is none")

    found = Refuses(None)({"row": [pickle.dumps(1), pickle.dumps(2)]})
    assert pickle.loads(found["answer"][0]) == 1 and list(found["refusal"]) == ["", "the second is none"]


def test_a_run_without_answers_ends_in_one_line():
    class Stuck:
        def iter_rows(self):
            yield {"answer": b"", "refusal": ""}
            raise ExecutionTimeoutError("no progress")

    rows = jobs._rows(Stuck())
    assert next(rows)["refusal"] == ""
    with pytest.raises(icejax.InputError, match="no actor has ended its lines within 24 hours: use a smaller --batch-size"):
        next(rows)


def test_a_full_queue_before_the_replicas_is_told():
    class Refused:
        def __aiter__(self):
            return self

        async def __anext__(self):
            raise BackPressureError(num_queued_requests=2, max_queued_requests=2)

        def cancel(self):
            pass

    sent, handle = [], types.SimpleNamespace(answer=types.SimpleNamespace(remote=lambda *_: Refused()))
    front = serving.Front(types.SimpleNamespace(options=lambda stream: handle), 100)

    async def receive():
        return {"type": "http.request", "body": b"{}"}

    async def send(message):
        sent.append(message)

    asyncio.run(front._answer(dict(type="http", path="/v1/completions"), receive, send))
    assert sent[0]["status"] == 429 and json.loads(sent[1]["body"])["error"]["code"] == "queue_full"


@pytest.fixture
def served(cluster):
    """The port of two replicas of the bundled model."""
    port = free_port()
    ray.init(cluster.address, log_to_driver=False)
    try:
        serve.start(http_options={"port": port})
        options = dict(
            replicas=2, cache="full", context_length=1024, max_new_tokens=16, slots=1, warmup=0, compile_cache="none"
        )
        serve.run(serving.server(options), name="icejax")
        yield port
        serve.shutdown()
    finally:
        ray.shutdown()


def ask(port: int, **body) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request("POST", "/v1/completions", json.dumps(body | {"max_tokens": 2, "temperature": 0}))
    response = connection.getresponse()
    text = response.read().decode()
    assert response.status == 200, text
    return text


def test_requests_about_one_document_go_to_the_replica_that_has_it(served, bundled):
    documents = [f"# {i}\n" + "import os\n" * 60 for i in range(4)]
    assert len({router.ranked(router.document_of(json.dumps({"prompt": d}).encode()), ["a", "b"])[0] for d in documents}) == 2
    for document in documents:
        first, again = (json.loads(ask(served, prompt=document)) for _ in range(2))
        assert again["choices"] == first["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    [expected] = icejax.generate(*bundled, documents[0], cache=Full(), max_new_tokens=2, context_length=1024)
    assert json.loads(ask(served, prompt=documents[0]))["choices"][0]["text"] == expected.text
    events = [line for line in ask(served, prompt=documents[0], stream=True).splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in events) == expected.text
