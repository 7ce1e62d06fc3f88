"""Runs parts one after another, each in a process of its own, within its own time and that of all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.device import graphs
from bench.device.results import DONE, Results

ROOT = Path(__file__).parents[2]
DUMP, TRACE = "dump", "trace"  # folders of the scratch


@dataclass(frozen=True)
class Part:
    """One thing to find out.

    Attributes:
        file: where its rows go.
        command: what Python is given; it prints JSON objects, a line each.
        least: seconds that must be left for it to start.
        most: seconds after which it is ended.
        what: is told in each of its rows.
        environment: variables of its process.
        xla_flags: are added to the environment's own.
        counted: whether the graphs of its decode programs are counted.
    """

    name: str
    file: str
    command: tuple[str, ...]
    least: float
    most: float
    what: dict = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    xla_flags: tuple[str, ...] = ()
    counted: bool = False


def run(
    parts: list[Part], results: Results, scratch: Path, *, seconds: float, told: Callable[[str], None], again: bool = False
) -> list[str]:
    """Runs what has not been done yet, as far as time allows, and returns the names of what is left.

    What was tried before and failed comes after what was not tried yet.

    Args:
        seconds: for all of them.
        told: is called with a line whenever a part has ended, or cannot start.
        again: whether to run all as they come, also what is done.
    """
    deadline, before = time.monotonic() + seconds, {} if again else results.ends()
    waiting = [part for part in parts if before.get(part.name, {}).get("end") != DONE]
    left = []
    for part in sorted(waiting, key=lambda part: part.name in before):
        there = deadline - time.monotonic()
        if there < part.least:
            left.append(part.name)
            told(f"{part.name}: not run: it needs {part.least:.0f} s, {max(there, 0):.0f} s are left")
            continue
        told(f"{part.name}: {_one(part, results, scratch, min(part.most, there))}")
    return left


def _one(part: Part, results: Results, scratch: Path, limit: float) -> str:
    """Runs a part and returns how it ended."""
    earlier, rows, beside = results.begin(part.name, part.file), [], []
    for name in (DUMP, TRACE):
        shutil.rmtree(scratch / name, ignore_errors=True)
    left_out = 0

    def read(stream) -> None:
        nonlocal left_out
        for line in stream:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
                left_out += not results.add(part.name, part.file, part.what | row)
            else:
                beside.append(line)

    started = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        # Its own group, so that what it has started ends with it; in our session, so that it ends where we are ended.
        process = subprocess.Popen(
            [sys.executable, *part.command], cwd=ROOT, env=_environment(part, scratch), stdout=subprocess.PIPE, stderr=said,
            stdin=subprocess.DEVNULL, text=True, errors="replace", process_group=0,
        )  # fmt: skip
        reader = threading.Thread(target=read, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            status = process.wait(limit)
            how = DONE if status == 0 else f"failed: status {status}" if status > 0 else f"failed: {_signal(-status)}"
        except subprocess.TimeoutExpired:
            how = f"ended after {limit:.0f} s, which was its limit"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reader.join(5)
        said.seek(0)
        text = "".join(beside) + said.read()
    if how.startswith("failed") and text.strip():
        how += f", {text.strip().splitlines()[-1][:160]}"
    if part.counted:
        _count(part, results, scratch, rows, earlier)
    shutil.rmtree(scratch / DUMP, ignore_errors=True)
    results.log(f"{part.name}: {how}", text)
    results.end(part.name, part.file, how, time.monotonic() - started, left_out)
    return how


def _signal(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _count(part: Part, results: Results, scratch: Path, rows: list[dict], earlier: list[dict]) -> None:
    """Adds a row per decode program that was compiled; programs that were kept from an earlier try were counted by it."""
    found = graphs.counted(scratch / DUMP)
    if not found:
        found = [row for row in earlier if "graphs" in row]
    timed = [row for row in rows if "tpot_s" in row]
    for i, program in enumerate(found):
        # Programs are compiled in the order of the rows; one that was left out leaves no telling.
        whose = {key: timed[i].get(key) for key in ("policy", "context", "batch")} if len(timed) == len(found) else {}
        results.add(part.name, part.file, part.what | whose | program)


def _environment(part: Part, scratch: Path) -> dict[str, str]:
    flags = [os.environ.get("XLA_FLAGS", ""), *part.xla_flags]
    if part.counted:
        flags += [f"--xla_dump_to={scratch / DUMP}", "--xla_dump_hlo_module_re=jit_step.*"]
    found = os.environ | dict(
        PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        PYTHONUNBUFFERED="1",
        HF_HUB_OFFLINE="1",
        JAX_COMPILATION_CACHE_DIR=str(scratch / "programs"),
        XLA_FLAGS=" ".join(filter(None, flags)),
    )
    found.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")
    return found | part.environment
