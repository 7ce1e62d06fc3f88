"""Where a decode step's time goes: a JAX trace, added up by the named scopes of the program."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np

SCOPES = ("qkv", "rope", "append", "select", "fetch", "attend", "evict", "output", "mlp")
# XLA drops the scope of a product with a weight; the weight's name tells it.
WEIGHTS = dict(q_proj="qkv", k_proj="qkv", v_proj="qkv", o_proj="output", gate_proj="mlp", up_proj="mlp", down_proj="mlp")
_LINE = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = (.*)$", re.MULTILINE)


def scope_of(hlo: str, leaves: list[str]) -> dict[str, str]:
    """Returns the scope of every instruction of an optimized program.

    A fusion has that of its root; what has none has that of the weight it reads, or else of what reads it.

    Args:
        leaves: the paths of the weights, as the program numbers them.
    """
    found, bare = {}, {}
    for name, text in _LINE.findall(hlo):
        path = re.search(r'op_name="([^"]*)"', text)
        weight = re.search(r"%leaves_(\d+)_", text)
        scope = next((part for part in path[1].split("/") if part in SCOPES), None) if path else None
        if scope is None and weight is not None:
            scope = next((WEIGHTS[part] for part in leaves[int(weight[1])].split(".") if part in WEIGHTS), None)
        found[name] = scope or "other"
        if scope is None and path is None:
            bare[name] = None
        elif scope is not None:
            for operand in re.findall(r"%([\w.-]+)", text):
                if operand in bare and bare[operand] is None:
                    bare[operand] = scope
    return found | {name: scope for name, scope in bare.items() if scope is not None}


def traced(folder: Path) -> list[dict]:
    """Returns the events of the only trace in a folder."""
    (file,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def by_scope(events: list[dict], scopes: dict[str, str], *, module: str, steps: int) -> dict[str, float]:
    """Returns milliseconds per step and scope of what `module` ran; other programs are `between steps`."""
    total: Counter[str] = Counter()
    for event in events:
        operation = event.get("args", {}).get("hlo_op")
        if operation is not None:
            inside = event["args"]["hlo_module"] == module
            total[scopes.get(operation, "other") if inside else "between steps"] += event["dur"]
    return {scope: round(total[scope] / 1000 / steps, 3) for scope in (*SCOPES, "other", "between steps")}


def python_ms(events: list[dict]) -> float:
    """Returns the median milliseconds of a decode step beside the compiled programs that it calls, while being traced."""
    events = [event for event in events if event.get("ph") == "X"]
    called = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith("PjitFunction("))
    steps, found = [e for e in events if re.fullmatch(r"\$decode_step\.py:\d+ step", e["name"])], []
    for step in steps:
        own, seen = step["dur"], step["ts"]
        for start, end in called:
            if step["ts"] <= start and end <= step["ts"] + step["dur"] and end > seen:  # one call may be told twice over
                own, seen = own - (end - max(start, seen)), end
        found.append(own)
    return round(float(np.median(found)) / 1000, 3)
