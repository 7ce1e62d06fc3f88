"""The rows of a report as cells of text, for the terminal and the page."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table

HEADS = ("task", "metric", "cache", "score", "n", "difference", "95% interval", "against", "device", "host", "ms/token")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Returns the cells of a row, in the order of `HEADS`; a cell without a value is empty."""
    error = "" if row["stderr"] is None else f" ± {row['stderr']:.4f}"
    paired = ("", "", "")
    if "difference" in row:
        paired = f"{row['difference']:+.4f}", f"{row['low']:+.4f} to {row['high']:+.4f}", row["against"]
    return (
        row["task"],
        row["metric"],
        row["cache"] + ("" if row["budget"] is None else f" {row['budget']}"),
        f"{row['score']:.4f}{error}",
        str(row["samples"] or ""),
        *paired,
        size(row["device_bytes"]),
        size(row["host_bytes"]),
        "" if row["seconds_per_token"] is None else f"{1000 * row['seconds_per_token']:.1f}",
    )


def size(count: int | None) -> str:
    """Returns bytes as MiB; nothing for none."""
    return f"{count / 2**20:.1f} MiB" if count else ""


def text(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a table for the terminal, with the model's name if the rows are of several."""
    several = len({row["model"] for row in rows}) > 1
    table = Table(*(["model"] if several else []), *HEADS)
    for row in rows:
        table.add_row(*([row["model"]] if several else []), *cells(row))
    shown = Console(width=200, file=io.StringIO())
    shown.print(table, markup=False)
    return shown.file.getvalue()
