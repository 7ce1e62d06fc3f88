"""The tables of `bench.serving`: loads, questions about a document, HTTP beside the engine, and the server's long runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from bench.markdown import table

RATIO = "http / engine"


def page(rows: list[dict]) -> Iterator[str]:
    """Yields the lines of the tables, by model and settings; a cell has the medians of its runs."""
    parts: dict[str, dict[str, list[dict]]] = {}
    for row in rows:
        part = "bars" if "measure" in row else "load" if row["part"] == "ratio" else row["part"]
        parts.setdefault(_heading(row), {}).setdefault(part, []).append(row)
    for heading, of_part in sorted(parts.items()):
        yield from (heading, "")
        for part, lines in {"load": _loads, "document": _documents, "bars": _bars, "cancel": _cancels, "soak": _soaks}.items():
            if part in of_part:
                yield from lines(of_part[part])
                yield ""


def _heading(row: dict) -> str:
    asked, options = row["asked"], f", `{row['options']}`" if row["options"] else ""
    return f"### {row['model']}, prompts of {asked['prompt_tokens']:,} tokens, answers of {asked['answer_tokens']:,}{options}"


def _loads(rows: list[dict]) -> Iterator[str]:
    cells = defaultdict(list)
    for row in rows:
        cells[row["subject"], _open(row)].append(row)
    columns = dict.fromkeys(column for _, column in cells)
    heads = [f"{column}: tokens/s; first token, s; ms per token" for column in columns]
    subjects = dict.fromkeys(row["subject"] for row in rows if row["part"] == "load")
    body = [[name, *(_load(cells[name, column]) for column in columns)] for name in subjects]
    ratios = [_ratio(cells[RATIO, column]) for column in columns]
    yield from table(["", *heads], [*body, [RATIO, *ratios]] if any(ratios) else body)


def _ratio(rows: list[dict]) -> str | None:
    """Returns the median ratio and its ends; None at a rate of requests, of which older files have ratios too."""
    ratios = [row["output_throughput"] for row in rows if row["request_rate"] is None]
    if not ratios:
        return None
    return f"{median(ratios):.2f}" + (f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else "")


def _open(row: dict) -> str:
    return f"{row['max_concurrency']} open" if row["request_rate"] is None else f"{row['request_rate']:g} a second"


def _load(rows: list[dict]) -> str | None:
    answered, failed = [row for row in rows if "median_ttft_ms" in row], sum(row["failed"] for row in rows)
    if not answered:
        return None
    tokens, first, later = (
        median(row.get(name, 0.0) for row in answered) for name in ("output_throughput", "median_ttft_ms", "median_tpot_ms")
    )
    return f"{tokens:.1f}; {first / 1e3:.2f}; {later:.1f}{_runs(answered)}" + (f"; {failed} failed" if failed else "")


def _runs(rows: list[dict]) -> str:
    return f"; {len(rows)} runs" if len(rows) > 1 else ""


def _documents(rows: list[dict]) -> Iterator[str]:
    cells = defaultdict(list)
    for row in rows:
        cells[row["subject"], row["question"]].append(row)
    numbers = sorted({number for _, number in cells})
    heads = [f"question {number}: first token, s (tokens of a cache)" for number in numbers]
    subjects = dict.fromkeys(subject for subject, _ in cells)
    yield from table(["", *heads], ([name, *(_document(cells[name, n]) for n in numbers)] for name in subjects))


def _document(rows: list[dict]) -> str | None:
    if not rows:
        return None
    first, cached, prompt = (median(row[name] for row in rows) for name in ("mean_ttft_ms", "cached_tokens", "prompt_tokens"))
    return f"{first / 1e3:.2f} ({cached:,.0f} of {prompt:,.0f}){_runs(rows)}"


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
