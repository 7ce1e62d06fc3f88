"""The rows of `bench.scale` in a file, and their page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench import markdown
from bench.scale.links import MACHINES
from icejax.checks.errors import InputError

KEY = ("shape", "layers", "context", "target", "devices", "weights", "cache", "whole")
COMPARED = (
    *("weight_bytes", "state_bytes", "pool_bytes", "temp_bytes"),
    *("flops", "device_bytes", "host_bytes", "collective_bytes", "sums"),
)
ROWS, PAGE = "scale.jsonl", "scale.md"
HEADS = (
    *("devices", "weights", "cache", "GiB weights", "GiB cache", "MiB temp", "fits", "GiB pool on the host"),
    *("GFLOP", "GB device", "MB host", "MB summed", "sums", "ms device", "ms host", "ms link", "ms FLOPs", "at most tokens/s"),
)
TEXT = """# One decode step on 1, 2, 4 and 8 devices

`python -m bench.scale --out bench/results` compiles decode steps of one row for devices that the machine does not have
({versions}). **No figure was timed.** Rows: [scale.jsonl](scale.jsonl).

Bytes and operations are those of one device. For each kind of layer (with all tokens on the device, with pages) a program of
one layer is compiled and one of two; what the second layer adds is counted for all layers of its kind.

| column | meaning |
|---|---|
| GiB weights, GiB cache | weights; keys, values and digests on the device, or what they would need |
| MiB temp | temporary memory of the largest program |
| fits | whether weights, cache and temporary memory fit the device; a prefill needs more |
| GiB pool on the host | this device's pages in host memory; the host holds as much for each device |
| GB device | bytes that a step reads and writes in the device's memory |
| MB host | bytes that a step fetches from host memory if the device has none of its pages yet |
| MB summed, sums | bytes of the activations that a step sums over the devices, and the number of sums |
| ms device, host, link, FLOPs | these bytes or operations at the peak rate: a lower bound, without starts of sums |
| at most tokens/s | 1,000 divided by the longest of the four |

If the start of a sum takes 10 us, 160 of them take 1.6 ms more.
Rows without *GFLOP* are of `--sizes`, which compiles nothing; their bytes are those of the arrays' shapes.

Peak rates:

{sources}
"""


def key_of(row: dict[str, Any]) -> tuple:
    """Returns the fields that identify a row."""
    return tuple(row.get(name) for name in KEY)


def add(folder: Path, row: dict[str, Any]) -> None:
    """Puts a row into the file of a folder, in place of one with the same key, and makes the page of all rows.

    A row of bytes alone does not replace a compiled one.

    Raises:
        InputError: the file holds other lines.
    """
    path = folder / ROWS
    try:
        old = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        found = {key_of(x): x for x in old}
    except (ValueError, AttributeError) as error:
        raise InputError(f"{path} must hold the rows of bench.scale: {error}; move it away") from None
    if "ms" in row or "left_out" in row or "ms" not in found.get(key_of(row), {}):
        found[key_of(row)] = row
    ordered = sorted(found.values(), key=lambda x: [(value is None, str(type(value)), value) for value in key_of(x)])
    path.write_text("".join(json.dumps(x) + "\n" for x in ordered))
    (folder / PAGE).write_text("\n".join(lines(ordered)))


def lines(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of the page."""
    used = [name for name in MACHINES if any(row["target"] == name for row in found)]
    versions = sorted({f"jax {row['jax']}, {row['plugin']}" for row in found if "jax" in row})
    yield TEXT.format(versions="; ".join(versions), sources="\n".join(f"* {MACHINES[name].sources}." for name in used))
    checked = {key_of(row)[:-1] for row in found if row.get("whole")}
    counted = [row for row in found if "weight_bytes" in row and key_of(row)[:-1] not in checked]
    for shape, context, target in dict.fromkeys((row["shape"], row["context"], row["target"]) for row in counted):
        yield f"## {shape}, {context:,} tokens, {MACHINES[target].title}\n"
        same = [row for row in counted if (row["shape"], row["context"], row["target"]) == (shape, context, target)]
        yield from markdown.table(HEADS, map(_cells, same))
        yield ""
    yield from _left_out(row for row in found if "left_out" in row)
    yield from _checks(found)


def _cells(row: dict[str, Any]) -> list[object]:
    compiled, ms = "ms" in row, row.get("ms", {})

    def scaled(name: str, unit: float, form: str) -> str | None:
        return format(row[name] / unit, form) if name in row else None

    return [
        row["devices"],
        row["weights"],
        row["cache"],
        scaled("weight_bytes", 2**30, ".2f"),
        scaled("state_bytes", 2**30, ".2f"),
        scaled("temp_bytes", 2**20, ".0f"),
        "yes" if row["fits"] else "**no**",
        scaled("pool_bytes", 2**30, ".2f"),
        scaled("flops", 1e9, ".1f"),
        scaled("device_bytes", 1e9, ".2f"),
        scaled("host_bytes", 1e6, ".1f"),
        scaled("collective_bytes", 1e6, ".1f"),
        scaled("sums", 1, ".0f"),
        *(f"{ms[name]:.2f}" if compiled else None for name in ("memory", "host", "link", "flops")),
        f"{1000 / max(ms.values()):.0f}" if compiled and row["fits"] else None,
    ]


def _left_out(found: Iterable[dict[str, Any]]) -> Iterator[str]:
    reasons: dict[tuple, list[str]] = {}
    for row in found:
        place = f"{row['devices']} x {row['target']}"
        reasons.setdefault((row["shape"], row["weights"], row["context"], row["cache"], row["left_out"]), []).append(place)
    if reasons:
        yield "## Left out\n"
        for (*labels, reason), places in reasons.items():
            yield f"* {', '.join(str(x) for x in labels if x is not None)} on {', '.join(places)}: {reason}"
        yield ""


def _checks(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yields how steps counted from few layers differ from the same steps compiled whole."""
    by_key = {key_of(row): row for row in found if "ms" in row}
    pairs = [(by_key.get((*key[:-1], False)), row) for key, row in by_key.items() if row["whole"]]
    cells = [_ratios(row, whole) for row, whole in pairs if row is not None]
    if cells:
        yield "## Counted against compiled whole\n"
        yield "Figures counted from programs of one and two layers, divided by those of the program of all layers.\n"
        heads = ("model", "layers", "tokens", "devices", "cache", *(name.removesuffix("_bytes") for name in COMPARED))
        yield from markdown.table(heads, cells)
        yield ""


def _ratios(row: dict[str, Any], whole: dict[str, Any]) -> list[object]:
    labels = [row["shape"], row["layers"], f"{row['context']:,}", f"{row['devices']} x {row['target']}", row["cache"]]
    return labels + [f"{row[name] / whole[name]:.4f}" if whole[name] else None for name in COMPARED]
