"""A Ray cluster of two nodes in processes of this machine: every line is answered once, though a worker is killed."""

import json
import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

import icejax
from icejax.cache.registry import Full

pytest.importorskip("ray", reason="needs Ray: pip install 'icejax[ray]'")
from ray.cluster_utils import Cluster

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
