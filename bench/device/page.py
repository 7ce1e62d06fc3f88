"""The Markdown page of `bench.device`, made from its result files alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.device import floor
from bench.device.results import DONE
from bench.markdown import table


def rendered(rows: list[dict], ends: dict[str, dict], names: Sequence[str]) -> str:
    """Returns the page in Markdown.

    Args:
        names: names of all parts, in their order.
    """
    order = {name: i for i, name in enumerate(names)}
    rows = sorted(rows, key=lambda row: order.get(row["part"], len(order)))
    timed = [row for row in rows if "weight_bytes" in row]  # needles have a time per token too
    programs = [row for row in rows if "graphs" in row]
    sections = (
        ("", _machine(rows)),
        ("Reading host memory", _fetch(rows)),
        ("Text against the CPU", _text(rows)),
        ("Needles", _needles(rows)),
        ("Questions in turns about long code", _turns(rows)),
        ("Decode", _decode(timed, programs)),
        ("Where a step's time goes, ms", _scopes(rows)),
        ("Share of a step that reading all of it would take", _shares(timed)),
        ("Memory, GB", _memory(timed)),
        ("Prefill", _prefill(rows)),
        ("What is missing", _missing(ends, names)),
    )
    text = ["# A device, measured\n"]
    for title, lines in sections:
        section_lines = [*lines]
        if section_lines:
            text += ["\n".join([f"## {title}\n", *section_lines] if title else section_lines) + "\n"]
    return "\n".join(text)


def _machine(rows: list[dict]) -> Iterator[str]:
    for row in rows:
        if "to_device_gb_per_s" not in row:
            continue
        devices = "; ".join(device["device"] for device in row["devices"])
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        yield f"{devices}; {row['host']['cores']} cores, {row['host']['memory_bytes'] / 1e9:.0f} GB on the host; {row['date']}."
        yield f"{versions}."
        if row["nvidia"]:
            yield "nvidia-smi: " + ", ".join(f"{name} {value}" for name, value in row["nvidia"].items()) + "."
        yield (
            f"One large array: {row['to_device_gb_per_s']} GB/s from pinned memory to the device, {row['to_host_gb_per_s']} "
            f"back, {row['device_memory_gb_per_s']} read and written on the device."
        )


def _fetch(rows: list[dict]) -> Iterator[str]:
    heads = ("by", "pages", "exact bits", "us", "GB/s")
    reads = []
    for row in rows:
        for read in row.get("fetch", ()):
            reads.append((read["backend"], "512 of 8 KiB (doctor)", read))
        if "table_bytes" in row:
            reads.append((row["backend"], f"448, {row['dtype']}, of {row['table_bytes'] / 1e9:.2f} GB", row))
    yield from table(
        heads,
        (
            (name, description, _exact(read), read.get("microseconds"), read.get("gb_per_s"))
            for name, description, read in reads
        ),
    )


def _exact(row: dict) -> str:
    return "yes" if row["exact"] else f"no: {row.get('fault', 'other bits')}"


def _text(rows: list[dict]) -> Iterator[str]:
    heads = ("cache", "dtype", "tokens alike", "logits apart by", "CPU's margin at the first that differs")
    compared = [row for row in rows if "alike" in row]
    yield from table(
        heads,
        (
            (row["policy"], row["dtype"], f"{row['alike']} of {row['tokens']}", f"{row['logits_apart']:.2g}", _margin(row))
            for row in compared
        ),
    )
    for row in rows:
        if "fault" in row and "dtype" in row and "policy" in row:
            yield f"\n{row['policy']}, {row['dtype']}: {row['fault']}."


def _margin(row: dict) -> str | None:
    return f"{row['margin_cpu']:.2g}" if "margin_cpu" in row else None


def _needles(rows: list[dict]) -> Iterator[str]:
    heads = ("task", "tokens", "cache", "budget", "right", "ms per token")
    needle_rows = [row for row in rows if "task" in row]
    yield from table(
        heads,
        (
            (
                row["task"], row["length"], row["cache"], row["budget"],
                f"{row['exact'] * row['questions']:.0f} of {row['questions']}", f"{1e3 * row['tpot_s']:.2f}",
            )
            for row in needle_rows
        ),
    )  # fmt: skip


def _turns(rows: list[dict]) -> Iterator[str]:
    heads = ("model", "tokens", "YaRN", "cache", "budget", "turn 1", "turn 2", "turn 3", "similarity", "texts", "seconds")
    shares = ("turn_1", "turn_2", "turn_3", "similarity")
    yield from table(
        heads,
        (
            (row["model"], row["length"], row["yarn"], row["cache"], row["budget"], *(f"{row[name]:.0%}" for name in shares),
             row["samples"], row["seconds"])
            for row in rows
            if "turn_1" in row
        ),
    )  # fmt: skip


def setting(row: dict) -> str:
    """Returns a row's options and flags that are not defaults."""
    flags = (f"{name}={value}" if value != "" else f"without {name}" for name, value in row.get("flags", {}).items())
    backend = [f"fetch by {row['backend']}"] if "backend" in row else []
    return ", ".join([*row.get("options", ()), *flags, *([row["xla_flags"]] if "xla_flags" in row else ()), *backend])


def _decode(timed: list[dict], programs: list[dict]) -> Iterator[str]:
    heads = (
        "shape",
        "tokens",
        "batch",
        "cache",
        "setting",
        "ms (10% - 90%)",
        "floor, ms",
        "times",
        "graphs",
        "outside of graphs",
    )
    programs_by_row = {(row["part"], row.get("policy"), row.get("context")): row for row in programs}
    cells = []
    for row in timed:
        floor_value = floor.floor_ms(row)
        ms, low, high = (1e3 * row[name] for name in ("tpot_s", "tpot_low_s", "tpot_high_s"))
        program = programs_by_row.get((row["part"], row["policy"], row["context"]), {})
        outside = ", ".join(f"{count} {kind}" for kind, count in program.get("outside", {}).items())
        times = (None, None) if floor_value is None else (f"{floor_value:.2f}", f"{ms / floor_value:.1f}")
        cells.append(
            (row["shape"], row["context"], row["batch"], row["policy"], setting(row), f"{ms:.2f} ({low:.2f} - {high:.2f})",
             *times, program.get("graphs"), outside or None)
        )  # fmt: skip
    yield from table(heads, cells)
    if any(floor.target(row["device"]) for row in timed):
        yield (
            "\nThe floor is what a step must read over 0.9 of the data sheet's bandwidth, "
            "assuming that no page is on the device."
        )
    for row in programs:
        if "policy" not in row:
            yield f"\n{row['part']}: a program of {row['graphs']} graphs and, outside of them, {row['outside']}."


def _scopes(rows: list[dict]) -> Iterator[str]:
    profiled = [row for row in rows if "scope_ms" in row]
    names = list(profiled[0]["scope_ms"]) if profiled else []
    heads = ("tokens", "cache", *names, "Python")
    yield from table(
        heads, ((row["context"], row["policy"], *(row["scope_ms"][x] for x in names), row["python_ms"]) for row in profiled)
    )


def _shares(timed: list[dict]) -> Iterator[str]:
    heads = ("shape", "tokens", "batch", "cache", "setting", "weights", "keys and values", "digests", "pages over the bus")
    cells = []
    for row in timed:
        shares = [f"{100 * share:.0f}%" for share in floor.shares(row).values()]
        if shares:
            cells.append((row["shape"], row["context"], row["batch"], row["policy"], setting(row), *shares))
    yield from table(heads, cells)
    if cells:
        yield "\nAt the data sheet's bandwidth. A step reads less: of a digest tree the nodes it opens, of embeddings a row."


def _memory(timed: list[dict]) -> Iterator[str]:
    names = ("weight_bytes", "device_kv_bytes", "digest_bytes", "host_kv_bytes", "peak_device_bytes", "peak_rss_bytes")
    sizes = ("weights", "keys and values", "digests", "pool", "device's largest", "process's largest")
    heads = ("shape", "tokens", "batch", "cache", "setting", *sizes)
    cells = []
    for row in timed:
        sizes = (None if row[name] is None else f"{row[name] / 1e9:.2f}" for name in names)
        cells.append((row["shape"], row["context"], row["batch"], row["policy"], setting(row), *sizes))
    yield from table(heads, cells)


def _prefill(rows: list[dict]) -> Iterator[str]:
    heads = ("shape", "layers", "tokens", "cache", "attention in blocks", "seconds", "tokens per second")
    prefill_rows = [row for row in rows if "prefill_s" in row]
    yield from table(
        heads,
        (
            (row["shape"], row["layers"], row["length"], row["policy"], "yes" if row["blocks"] else "as the platform has it",
             row["prefill_s"], row["tokens_per_s"])
            for row in prefill_rows
        ),
    )  # fmt: skip


def _missing(ends: dict[str, dict], names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if name not in ends:
            yield f"- {name}: not run."
        elif ends[name]["end"] != DONE:
            yield f"- {name}: {ends[name]['end']}."
