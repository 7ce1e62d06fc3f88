"""Tables in Markdown, for the pages of results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

NONE = "-"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yields the lines of a table, and no lines without rows; a cell that is None becomes a dash."""
    rows = [[NONE if cell is None else str(cell).replace("|", "\\|") for cell in row] for row in rows]
    if rows:
        yield f"| {' | '.join(heads)} |"
        yield f"|{'---|' * len(heads)}"
        yield from (f"| {' | '.join(row)} |" for row in rows)
