"""Runs the parts of `bench.device` one after another, each in its own process and within time limits."""

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
DUMP, TRACE = "dump", "trace"  # folders in the scratch folder


@dataclass(frozen=True)
class Part:
    """One measurement, by a command.

    Attributes:
        name: its name in results.
        file: name of the file for its rows.
        command: arguments of Python; the command prints JSON objects, one per line.
        least: seconds that must be left, or the part does not start.
        most: seconds after which the part is ended.
        what: fields that are added to each of its rows.
        environment: environment variables of its process.
        xla_flags: flags added to the XLA_FLAGS of the environment.
        counted: whether to count the graphs of its decode programs.
        needs: a file or folder without which the part does not start; None: it needs none.
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
    needs: Path | None = None


def run(
    parts: list[Part], results: Results, scratch: Path, *, seconds: float, told: Callable[[str], None], again: bool = False
) -> list[str]:
    """Runs the parts that are not done yet while time is left; returns the names of parts that did not run.

    Parts that failed in an earlier call come after parts that have not run.

    Args:
        seconds: limit for all parts together.
        told: called with a line whenever a part has ended, or cannot start.
        again: whether to run all parts in the given order, done or not.
    """
    deadline, earlier_ends = time.monotonic() + seconds, {} if again else results.ends()
    waiting = [part for part in parts if earlier_ends.get(part.name, {}).get("end") != DONE]
    not_run = []
    for part in sorted(waiting, key=lambda part: part.name in earlier_ends):
        seconds_left = deadline - time.monotonic()
        if seconds_left < part.least:
            not_run.append(part.name)
            told(f"{part.name}: not run: it needs {part.least:.0f} s, {max(seconds_left, 0):.0f} s are left")
            continue
        if part.needs is not None and not part.needs.exists():
            not_run.append(part.name)
            told(f"{part.name}: not run: it needs {part.needs}, which is not on this machine: bring it there")
            continue
        told(f"{part.name}: {_one(part, results, scratch, min(part.most, seconds_left))}")
    return not_run


def _one(part: Part, results: Results, scratch: Path, limit: float) -> str:
    """Runs a part and returns its end: `done`, or what went wrong."""
    earlier, rows, other_lines = results.begin(part.name, part.file), [], []
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
                other_lines.append(line)

    started = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as messages:
        # In a process group of its own, so all that the part started is killed with it; in our session, so it ends with us.
        process = subprocess.Popen(
            [sys.executable, *part.command], cwd=ROOT, env=_environment(part, scratch), stdout=subprocess.PIPE, stderr=messages,
            stdin=subprocess.DEVNULL, text=True, errors="replace", process_group=0,
        )  # fmt: skip
        reader = threading.Thread(target=read, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            status = process.wait(limit)
            end = DONE if status == 0 else f"failed: status {status}" if status > 0 else f"failed: {_signal(-status)}"
        except subprocess.TimeoutExpired:
            end = f"ended after {limit:.0f} s, which was its limit"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reader.join(5)
        messages.seek(0)
        text = "".join(other_lines) + messages.read()
    if end.startswith("failed") and text.strip():
        end += f", {text.strip().splitlines()[-1][:160]}"
    if part.counted:
        _count(part, results, scratch, rows, earlier)
    shutil.rmtree(scratch / DUMP, ignore_errors=True)
    results.log(f"{part.name}: {end}", text)
    results.end(part.name, part.file, end, time.monotonic() - started, left_out)
    return end


def _signal(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _count(part: Part, results: Results, scratch: Path, rows: list[dict], earlier: list[dict]) -> None:
    """Adds a row per compiled decode program; programs that an earlier run compiled keep that run's rows."""
    program_rows = graphs.counted(scratch / DUMP)
    if not program_rows:
        program_rows = [row for row in earlier if "graphs" in row]
    timed = [row for row in rows if "tpot_s" in row]
    for i, program in enumerate(program_rows):
        # Programs are compiled in the order of the rows; if their numbers differ, it is unknown which belongs to which.
        labels = {key: timed[i].get(key) for key in ("policy", "context", "batch")} if len(timed) == len(program_rows) else {}
        results.add(part.name, part.file, part.what | labels | program)


def _environment(part: Part, scratch: Path) -> dict[str, str]:
    flags = [os.environ.get("XLA_FLAGS", ""), *part.xla_flags]
    if part.counted:
        flags += [f"--xla_dump_to={scratch / DUMP}", "--xla_dump_hlo_module_re=jit_step.*"]
    variables = os.environ | dict(
        PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        PYTHONUNBUFFERED="1",
        HF_HUB_OFFLINE="1",
        JAX_COMPILATION_CACHE_DIR=str(scratch / "programs"),
        XLA_FLAGS=" ".join(filter(None, flags)),
    )
    variables.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")
    return variables | part.environment
