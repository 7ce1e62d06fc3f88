"""The plots of `bench.compare`."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from bench.compare.rows import FIRST

OURS = ("coded", "clustered", "tolerant")  # drawn thick, above all others
NO_ERROR = 1e-4  # smaller errors are not drawn
COLUMNS = (
    ("tokens", "exact", "budget, tokens", "answers that are right"),
    ("device_bytes", "exact", "bytes of the cache on the device", "answers that are right"),
    ("moved_bytes", "exact", "bytes moved from the host per token", "answers that are right"),
    ("tokens", "error", "budget, tokens", "relative error of the attention output"),
)
TIME = ("length", "tpot_s", "tokens of the text", "seconds per token")


def alike(found: list[dict]) -> list[dict]:
    """Returns rows that can be compared in one plot: one model and length, and only policies with rows in all its cells.

    A cell is a model, length, task and protocol. Cells where the full cache answers less than half are left out, and cells with
    fewer rows than the largest cell. The model and length are those with most remaining cells; of equals, the longest text.
    """
    policies, counts, answered = defaultdict(set), Counter(), {}
    cell_of = lambda row: tuple(row[name] for name in ("model", "length", "task", "protocol"))  # noqa: E731
    for row in found:
        policies[cell_of(row)].add(row["policy"])
        if ":" not in row["policy"]:
            counts[cell_of(row)] += 1
        if row["policy"] == "full":
            answered[cell_of(row)] = row["exact"]
    answerable = [cell for cell in policies if answered.get(cell, 1.0) >= 0.5]
    largest = max((counts[cell] for cell in answerable), default=0)
    full_cells = [cell for cell in answerable if counts[cell] == largest]
    cells_by_place = Counter(cell[:2] for cell in full_cells)
    place = max(cells_by_place, key=lambda place: (cells_by_place[place], place[1]), default=None)
    cells = {cell for cell in full_cells if cell[:2] == place}
    in_all_cells = set.intersection(*(policies[cell] for cell in cells)) if cells else set()
    return [row for row in found if cell_of(row) in cells and row["policy"] in in_all_cells]


def draw(found: list[dict], path: Path) -> None:
    """Draws answers against budget, device bytes and bytes moved, error against budget, and time per token against context.

    The plots show the rows of `alike`, the times all lengths of the same model. A point is the mean over tasks and protocols; a
    policy without a budget is drawn at the number of tokens that it attends to. Every policy has its own colour and marker, so
    it can be recognised in grey too. The legend lists the exact cache and the oracles first, then policies by their answers.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = alike(found)
    timed = [row for row in found if rows and row["model"] == rows[0]["model"] and row["tpot_s"] is not None]
    panels = [(rows, *columns) for columns in COLUMNS] + ([(timed, *TIME)] if timed else [])
    figure, axes = plt.subplots(2, 3, figsize=(18, 10), layout="constrained")
    names = sorted({row["policy"] for row in rows}, key=lambda name: _order([row for row in rows if row["policy"] == name]))
    colours, markers = plt.get_cmap("turbo")(np.linspace(0.02, 0.95, len(names))), "osv^<>DPX*hd"
    for (panel_rows, x, y, xlabel, ylabel), panel in zip(panels, axes.flat, strict=False):
        for i, name in enumerate(names):
            pairs = _points([row for row in panel_rows if row["policy"] == name], x, y)
            if pairs:
                style = dict(linewidth=3.5, color="black", zorder=3) if name in OURS else dict(linewidth=1.2, color=colours[i])
                dashes = ("-", "--", ":")[i // len(markers) % 3]
                panel.plot(
                    *zip(*pairs, strict=True),
                    label=name,
                    marker=markers[i % len(markers)],
                    markersize=7,
                    linestyle=dashes,
                    **style,
                )
        panel.set(xlabel=xlabel, ylabel=ylabel, yscale="linear" if y == "exact" else "log")
        panel.set_xscale("symlog", linthresh=1e4) if x == "moved_bytes" else panel.set_xscale("log", base=2)
        panel.grid(alpha=0.3)
    for panel in axes.flat[len(panels) :]:
        panel.axis("off")
    if rows:
        tasks = ", ".join(sorted({row["task"] for row in rows}))
        figure.suptitle(f"{rows[0]['model']}, {rows[0]['length']:,} tokens: means of {tasks} and of both forms of question")
    legend = axes.flat[len(panels)]
    legend.legend(*axes.flat[0].get_legend_handles_labels(), loc="center", ncols=2, frameon=False)
    part = path.with_name(f".{path.name}.part")
    figure.savefig(part, dpi=110, format=path.suffix[1:])
    plt.close(figure)
    part.replace(path)


def _order(rows: list[dict]) -> tuple:
    """Returns the sort key of a policy in the legend, from its rows."""
    return rows[0]["policy"] not in FIRST, -np.mean([row["exact"] for row in rows]), np.mean([row["error"] for row in rows])


def _points(rows: list[dict], x: str, y: str) -> list[list[float]]:
    """Returns the mean point of a policy's rows for each budget or length."""
    points = defaultdict(list)
    for row in rows:
        if row[y] is not None and (y != "error" or row[y] > NO_ERROR):
            key = row["length"] if x == "length" else row["budget"]
            points[key].append((row[x] or row["attended"] if x == "tokens" else row[x], row[y]))
    return sorted(np.mean(values, axis=0).tolist() for values in points.values())
