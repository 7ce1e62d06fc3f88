"""One model over several processes on this machine: they answer as one device does, and end together."""

import json
import threading
import time
import types
from unittest.mock import Mock

import jax
import numpy as np
import pytest

import icejax
from icejax.commands import group
from icejax.runtime import devices, mesh, processes
from tests import tolerances
from tests.helpers.commands import SHORT, run
from tests.helpers.in_processes import coordinator, generate, generate_in_cluster, leader_worker_set, model_folder, slurm, start
from tests.helpers.on_devices import CASES

LIMIT_S = 600  # seconds of a run, on a busy machine
TEXT = ["--cache", "clustered", "--budget", "64", "-n", "12", "--quiet"]
SAMPLED = ["--temperature", "1", "--top-p", "0.9", "--seed", "3"]
LOST = f"icejax generate: error: {group.LOST_LINE}\n"


def outcomes(started):
    """Returns exit status, stdout and stderr of every process."""
    try:
        texts = [process.communicate(timeout=LIMIT_S) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *text) for process, text in zip(started, texts, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "names"),
    [
        (2, ("full-2", "clustered", "coded", "snapkv", "experts clustered", "latent clustered")),
        (4, ("full-4", "experts clustered", "latent keydiff")),
    ],
)
def test_several_processes_decode_as_one_device(count, names):
    address = coordinator()
    commands = [["-m", "tests.helpers.in_processes", address, str(count), str(i), *names] for i in range(count)]
    (status, out, err), *others = outcomes(start(*commands))
    assert status == 0, err[-2000:]
    results = [json.loads(line) for line in out.splitlines() if line.startswith("{")]  # gloo writes to stdout
    assert [result["case"] for result in results] == [*names]
    for result in results:
        _, cache, _, _ = CASES[result["case"]]
        assert result["error"] < (tolerances.CODES_ON_DEVICES if cache == "coded" else tolerances.LOGITS)
        assert result["same_tokens"] and result["in_place"] and result["devices"] == count
        [gathered] = [name for name in result["collectives"] if not name.endswith("total/psum")]
        assert gathered.endswith("gathered/all_gather")
    assert [status for status, *_ in others] == [0] * (count - 1)


@pytest.mark.slow
def test_an_engine_over_two_processes_answers_as_one_device():
    """Rows that join, drawn rows, two answers to a prompt, a cached prefix, a cancelled request, and one behind `compile_for`."""
    address = coordinator()
    commands = [["-m", "tests.helpers.in_processes", address, "2", str(i), "engine"] for i in range(2)]
    (status, out, err), other = outcomes(start(*commands))
    assert (status, other[0]) == (0, 0), (err[-2000:], other[2][-2000:])
    results = [json.loads(line) for line in out.splitlines() if line.startswith("{")]  # gloo writes to stdout
    assert [result["cache"] for result in results] == ["Full", "Clustered"]
    for result in results:
        *_, document, _, sample, _ = result["cached"]
        assert result["same"] and document >= 256 and sample == 40


@pytest.mark.slow
def test_a_command_in_a_cluster_prints_the_text_of_one_process(tmp_path, capsys):
    folder, prompt = model_folder(tmp_path), "he 12 x " * 12
    for more, cluster in (([], leader_worker_set), (SAMPLED, slurm)):
        alone = run(capsys, "-m", str(folder), *TEXT, *more, prompt)
        first, second = start(*generate_in_cluster(folder, *TEXT, *more, "-p", "-"), variables=cluster())
        first.stdin.write(prompt)  # the second one reads no prompt
        first.stdin.close()
        first.stdin = None
        assert outcomes([first, second]) == [alone, (0, "", "")]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_a_process_ends_the_others_with_a_line(tmp_path, victim):
    folder = model_folder(tmp_path)
    started = start(*generate(folder, 2, "--cache", "full", "-n", "4000", "--quiet", "--logit-bias", "2=-100", "he 12 x"))
    started[0].stdout.read(1)  # the answer has begun
    started[victim].kill()
    killed = time.monotonic()
    (status, _, err) = outcomes(started)[1 - victim]
    assert time.monotonic() - killed < 2 * processes.HEARTBEAT_S + 60  # beside the time that a busy machine takes to end it
    assert (status, err) == (group.LOST, LOST)


@pytest.mark.slow
def test_other_options_in_a_process_end_the_group(tmp_path):
    first, second = generate(model_folder(tmp_path), 2, "--cache", "full", "he")
    error = "icejax generate: error: --budget is '7' here and 'None' in process 0: give all processes the same\n"
    (status, out, err), (own_status, own_out, own_err) = outcomes(start(first, [*second, "--budget", "7"]))
    assert (own_status, own_out, own_err) == (2, "", error)
    assert (status, out, err) == (group.LOST, "", LOST)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "2"], "--processes needs --coordinator HOST:PORT"),
        (["--process", "0"], "--process needs --coordinator HOST:PORT"),
        (
            ["--coordinator", "a:1", "--processes", "2", "--process", "0"],
            "--coordinator needs --mesh heads=N: the processes share the KV heads of one model",
        ),
        (
            ["--coordinator", "a:1", "--mesh", "heads=2", "--session", "talk"],
            "--session runs in one process: leave --coordinator out",
        ),
        (
            ["--coordinator", "a:1", "--mesh", "heads=2", "--explain", "a.png"],
            "--explain runs in one process: leave --coordinator out",
        ),
        (
            ["--coordinator", "a:1", "--mesh", "heads=2", "--output", "a.jsonl"],
            "--output runs in one process: leave --coordinator out",
        ),
        (["--coordinator", "a", "--mesh", "heads=2"], "coordinator must be HOST:PORT or auto, got 'a'"),
        (["--coordinator", "a:70000", "--mesh", "heads=2"], "coordinator must be HOST:PORT or auto, got 'a:70000'"),
        (
            ["--coordinator", "a:1", "--mesh", "heads=2", "--processes", "2"],
            "coordinator a:1 needs the number of processes and of this one, from 0: give both",
        ),
        (
            ["--coordinator", "a:1", "--mesh", "heads=2", "--processes", "2", "--process", "2"],
            "process must be at most 1, got 2",
        ),
        (
            ["--coordinator", "auto", "--mesh", "heads=2", "--processes", "2"],
            "coordinator auto finds the number of processes and of this one: leave them out, or give HOST:PORT",
        ),
    ],
)
def test_a_group_that_cannot_be_is_refused(capsys, arguments, message):
    assert run(capsys, *SHORT, *arguments, "a") == (2, "", f"icejax.generate: error: {message}\n")


def test_a_leader_worker_set_names_the_group(monkeypatch):
    for name, value in {processes.LEADER: "set-0.set", processes.SIZE: "3", processes.INDEX: "2"}.items():
        monkeypatch.setenv(name, value)
    assert processes.membership("auto", None, None) == ("set-0.set:8476", 3, 2)
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "1234")
    assert processes.membership("auto", None, None) == ("set-0.set:1234", 3, 2)
    monkeypatch.setenv(processes.SIZE, "")
    with pytest.raises(icejax.InputError) as error:
        processes.membership("auto", None, None)
    expected = "LWS_GROUP_SIZE and LWS_WORKER_INDEX must be whole numbers beside LWS_LEADER_ADDRESS, got '' and '2'"
    assert str(error.value) == expected
    monkeypatch.delenv(processes.LEADER)
    assert processes.membership("auto", None, None) == (None, None, None)


def test_a_process_that_has_started_jax_joins_no_group(monkeypatch):
    assert devices.platform() == "cpu"
    with pytest.raises(icejax.InputError) as error:
        icejax.join("127.0.0.1:1", processes=2, process=0)
    assert str(error.value) == "JAX has started its devices: join a group of processes before anything else"
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(icejax.InputError) as error:
        icejax.join("127.0.0.1:1", processes=2, process=0)
    assert str(error.value) == "this process has joined a group of processes already: join once"


def test_a_group_that_cannot_begin_is_refused(monkeypatch):
    monkeypatch.setattr(devices, "started", lambda: False)
    for name in (devices.PINNED_LIMIT, devices.CPU_THREADS):
        monkeypatch.setenv(name, "4")  # `join` sets them, for good
    monkeypatch.delenv(processes.LEADER, raising=False)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    refused = {
        ("UNKNOWN: Failed to start RPC server", "h:1"): "process 0 cannot listen at h:1: the port is in use, or HOST is no "
        "address of this machine",
        ("coordinator_address should be defined.", "auto"): "coordinator auto finds no SLURM, Open MPI, TPU pod, indexed "
        "Kubernetes job or LeaderWorkerSet: give the coordinator's HOST:PORT, the number of processes and the number of this one",
        ("a\nb", "h:1"): "process 0 cannot join its group at the coordinator h:1: a",
    }
    for (reason, place), message in refused.items():
        monkeypatch.setattr(jax.distributed, "initialize", Mock(side_effect=RuntimeError(reason)))
        with pytest.raises(icejax.InputError) as error:
            icejax.join(place, **{} if place == "auto" else dict(processes=2, process=0))
        assert str(error.value) == message


def test_processes_have_equally_many_devices_of_a_mesh(monkeypatch):
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(devices, "first", lambda: [None] * 8)
    with pytest.raises(icejax.InputError) as error:
        mesh.read_mesh("heads=3")
    assert str(error.value) == "mesh heads=3 is over 2 processes: its devices must be a multiple of 2"
    assert mesh.read_mesh("heads=4") == mesh.Mesh(4)


def test_what_runs_in_one_process_is_refused_in_several(monkeypatch, bundled, tmp_path):
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(bundled[0], "mesh", mesh.Mesh(2))
    for name, make in {
        "a session": lambda: icejax.Session(*bundled),
        "an engine with a prefix_dir": lambda: icejax.Engine(*bundled, prefix_dir=tmp_path),
    }.items():
        with pytest.raises(icejax.InputError) as error:
            make()
        assert str(error.value) == f"{name} runs in one process: leave its group"


def test_calls_that_differ_are_refused(monkeypatch):
    sent = []
    monkeypatch.setattr(processes, "from_first", lambda value: sent.append(value) or sent[0])
    processes.check_alike("prompts", ("a", np.int32(1)))
    processes.check_alike("prompts", ("a", np.int32(1)))
    with pytest.raises(icejax.InputError) as error:
        processes.check_alike("prompts", ("b", np.int32(1)))
    assert str(error.value) == "prompts of process 0 are not those of process 0: give all processes the same"


def test_a_group_without_progress_ends(monkeypatch, capsys):
    """While a process waits for work it need make none."""
    monkeypatch.setattr(processes, "count", lambda: 2)
    ended, statuses, now, asked = threading.Event(), [], [0.0], []

    def looked() -> None:
        looks = len(asked) + 2
        while len(asked) < looks and not ended.is_set():
            time.sleep(0.005)

    clock = types.SimpleNamespace(monotonic=lambda: asked.append(1) or now[0])
    monkeypatch.setattr(processes, "time", clock)
    with processes.watched(seconds=0.04, end=lambda status: (statuses.append(status), ended.set())):
        for now[0] in (0.03, 0.06, 0.09):
            looked()
            assert not ended.is_set()
            processes.moved()
        with processes.at_rest():
            now[0] = 1.0
            looked()
            assert not ended.is_set()
        now[0] = 1.05
        assert ended.wait(60)
    assert statuses == [1]
    assert capsys.readouterr().err == "icejax: error: process 0 of 2 made no progress for 0 s: it ends, and its group\n"
