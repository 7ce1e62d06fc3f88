"""Times of a decode step by named scope, from a JAX trace and the optimised program: for `bench.decode --profile`."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np

SCOPES = ("qkv", "rope", "append", "select", "fetch", "attend", "evict", "output", "mlp")
# XLA drops the scope of a product with a weight; it follows from the weight's name.
WEIGHTS = dict(q_proj="qkv", k_proj="qkv", v_proj="qkv", o_proj="output", gate_proj="mlp", up_proj="mlp", down_proj="mlp")
_LINE = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = (.*)$", re.MULTILINE)


def scope_of(hlo: str, leaves: list[str]) -> dict[str, str]:
    """Returns the scope of every instruction of an optimized program, by name.

    A fusion has the scope of its root. An instruction without a scope has that of the weight it reads, else of the instruction
    that reads its result, else `other`.

    Args:
        leaves: paths of the weights; the program's parameter `leaves_3` is the weight at leaves[3].
    """
    scopes, scopes_of_readers = {}, {}
    for name, text in _LINE.findall(hlo):
        path = re.search(r'op_name="([^"]*)"', text)
        weight = re.search(r"%leaves_(\d+)_", text)
        scope = next((part for part in path[1].split("/") if part in SCOPES), None) if path else None
        if scope is None and weight is not None:
            scope = next((WEIGHTS[part] for part in leaves[int(weight[1])].split(".") if part in WEIGHTS), None)
        scopes[name] = scope or "other"
        if scope is None and path is None:
            scopes_of_readers[name] = None
        elif scope is not None:
            for operand in re.findall(r"%([\w.-]+)", text):
                if operand in scopes_of_readers and scopes_of_readers[operand] is None:
                    scopes_of_readers[operand] = scope
    return scopes | {name: scope for name, scope in scopes_of_readers.items() if scope is not None}


def traced(folder: Path) -> list[dict]:
    """Returns the events of the only trace in a folder."""
    (file,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def by_scope(events: list[dict], scopes: dict[str, dict[str, str]], *, steps: int) -> dict[str, float]:
    """Returns milliseconds per step by scope; the time of programs that `scopes` lacks is `between steps`.

    Args:
        scopes: scope of every instruction, by program and instruction.
    """
    total: Counter[str] = Counter()
    for event in events:
        operation = event.get("args", {}).get("hlo_op")
        if operation is not None:
            program = scopes.get(event["args"]["hlo_module"])
            total["between steps" if program is None else program.get(operation, "other")] += event["dur"]
    return {scope: round(total[scope] / 1000 / steps, 3) for scope in (*SCOPES, "other", "between steps")}


def python_ms(events: list[dict]) -> float:
    """Returns the median milliseconds of a traced decode step outside the compiled programs that it calls."""
    events = [event for event in events if event.get("ph") == "X"]
    called = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith("PjitFunction("))
    steps, durations = [e for e in events if re.fullmatch(r"\$step\.py:\d+ step", e["name"])], []
    for step in steps:
        duration, last_end = step["dur"], step["ts"]
        for start, end in called:
            if step["ts"] <= start and end <= step["ts"] + step["dur"] and end > last_end:  # a trace may hold one call twice
                duration, last_end = duration - (end - max(start, last_end)), end
        durations.append(duration)
    return round(float(np.median(durations)) / 1000, 3)
