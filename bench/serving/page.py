"""The tables of `bench.serving`: loads, questions about a document, HTTP beside the engine, and the server's long runs."""

from __future__ import annotations

from collections.abc import Iterator

from bench.markdown import table


def page(rows: list[dict]) -> Iterator[str]:
    """Yields the lines of the tables, by model."""
    for model in dict.fromkeys(row["model"] for row in rows):
        of_part: dict[str, list[dict]] = {}
        for row in rows:
            if row["model"] == model:
                of_part.setdefault("bars" if "measure" in row else row["part"], []).append(row)
        yield from (f"### {model}", "")
        for part, lines in {"load": _loads, "document": _documents, "bars": _bars, "cancel": _cancels, "soak": _soaks}.items():
            if part in of_part:
                yield from lines(of_part[part])
                yield ""


def _loads(rows: list[dict]) -> Iterator[str]:
    cells = {(row["subject"], _open(row)): row for row in rows}
    columns = dict.fromkeys(column for _, column in cells)
    heads = [f"{column}: tokens/s; first token, s; ms per token" for column in columns]
    subjects = dict.fromkeys(subject for subject, _ in cells)
    body = [[name, *(_load(cells.get((name, column))) for column in columns)] for name in subjects]
    if {"http", "engine"} <= subjects.keys():
        body.append(["http / engine", *(_ratio(*(cells.get((name, n)) for name in ("http", "engine"))) for n in columns)])
    yield from table(["", *heads], body)


def _ratio(http: dict | None, engine: dict | None) -> str | None:
    """Returns None for a run that was cut short."""
    return f"{http['output_throughput'] / engine['output_throughput']:.2f}" if http and engine else None


def _open(row: dict) -> str:
    return f"{row['max_concurrency']} open" if row["request_rate"] is None else f"{row['request_rate']:g} a second"


def _load(row: dict | None) -> str | None:
    if row is None or "median_ttft_ms" not in row:
        return None
    figures = f"{row['output_throughput']:.1f}; {row['median_ttft_ms'] / 1e3:.2f}; {row.get('median_tpot_ms', 0.0):.1f}"
    return figures + (f"; {row['failed']} failed" if row["failed"] else "")


def _documents(rows: list[dict]) -> Iterator[str]:
    cells = {(row["subject"], row["question"]): row for row in rows}
    numbers = sorted({number for _, number in cells})
    heads = [f"question {number}: first token, s (tokens of a cache)" for number in numbers]
    subjects = dict.fromkeys(subject for subject, _ in cells)
    yield from table(["", *heads], ([name, *(_document(cells.get((name, n))) for n in numbers)] for name in subjects))


def _document(row: dict | None) -> str | None:
    return row and f"{row['mean_ttft_ms'] / 1e3:.2f} ({row['cached_tokens']:,} of {row['prompt_tokens']:,})"


def _bars(rows: list[dict]) -> Iterator[str]:
    heads = ["part, measure", "ratio", "bar", "holds"]
    yield from table(heads, ([f"{r['part']}, {r['measure']}", f"{r['ratio']:.2f}", r["bar"], _yes(r["holds"])] for r in rows))


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _cancels(rows: list[dict]) -> Iterator[str]:
    heads = ["clients that left", "answers before they left", "extents leaked, of"]
    yield from table(heads, ([r["cancels"], r["over_before"], f"{r['extents_leaked']}, {r['free_extents']}"] for r in rows))


def _soaks(rows: list[dict]) -> Iterator[str]:
    heads = ["minutes", "requests (of the page); failed", "MiB: start, most, end", "MiB per hour, later half", "compiled"]
    yield from table(heads, (_soak(row) for row in rows))


def _soak(row: dict) -> list[str]:
    sizes = ", ".join(f"{row[name]:,.0f}" for name in ("rss_start_mib", "rss_most_mib", "rss_end_mib"))
    counts = f"{row['requests']:,} ({row.get('looks', 0):,}); {row['failed']}"
    return [f"{row['minutes']:g}", counts, sizes, f"{row['rss_mib_per_hour']:,.0f}", str(row["compiled_after_warmup"])]
