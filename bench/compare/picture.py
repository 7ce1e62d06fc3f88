"""The plots of a comparison."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from bench.compare.rows import FIRST

OURS = ("coded", "clustered", "tolerant")  # drawn thick, above all others
NO_ERROR = 1e-4  # an error below which there is none
COLUMNS = (
    ("tokens", "exact", "budget, tokens", "answers that are right"),
    ("device_bytes", "exact", "bytes of the cache on the device", "answers that are right"),
    ("moved_bytes", "exact", "bytes moved from the host per token", "answers that are right"),
    ("tokens", "error", "budget, tokens", "relative error of the attention output"),
)
TIME = ("length", "tpot_s", "tokens of the text", "seconds per token")


def alike(found: list[dict]) -> list[dict]:
    """Returns the rows of one model and length, of all tasks and protocols that most policies have with most budgets there.

    Of the policies that have all of these. The model and length are those of most such rows; of as many, the longest text.
    Where the full cache answers less than half, nothing is told of other caches.
    """
    policies, counts, answered = defaultdict(set), Counter(), {}
    where = lambda row: tuple(row[name] for name in ("model", "length", "task", "protocol"))  # noqa: E731
    for row in found:
        policies[where(row)].add(row["policy"])
        if ":" not in row["policy"]:
            counts[where(row)] += 1
        if row["policy"] == "full":
            answered[where(row)] = row["exact"]
    can = [cell for cell in policies if answered.get(cell, 1.0) >= 0.5]
    most = max((counts[cell] for cell in can), default=0)
    whole = [cell for cell in can if counts[cell] == most]
    places = Counter(cell[:2] for cell in whole)
    place = max(places, key=lambda place: (places[place], place[1]), default=None)
    cells = {cell for cell in whole if cell[:2] == place}
    everywhere = set.intersection(*(policies[cell] for cell in cells)) if cells else set()
    return [row for row in found if where(row) in cells and row["policy"] in everywhere]


def draw(found: list[dict], path: Path) -> None:
    """Draws answers against budget, device bytes and bytes moved, error against budget, and time per token against context.

    Of the rows that are `alike`, times of all lengths of their model. A point is the mean over tasks and protocols; a policy
    without a budget stands at what it attends to. Every policy has its own colour and marker, so that it is told apart in grey
    too. Names stand in the order of their answers, the exact cache and the oracles first.
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
    for (of, x, y, xlabel, ylabel), each in zip(panels, axes.flat, strict=False):
        for i, name in enumerate(names):
            pairs = _points([row for row in of if row["policy"] == name], x, y)
            if pairs:
                ours = dict(linewidth=3.5, color="black", zorder=3) if name in OURS else dict(linewidth=1.2, color=colours[i])
                dashes = ("-", "--", ":")[i // len(markers) % 3]
                each.plot(
                    *zip(*pairs, strict=True),
                    label=name,
                    marker=markers[i % len(markers)],
                    markersize=7,
                    linestyle=dashes,
                    **ours,
                )
        each.set(xlabel=xlabel, ylabel=ylabel, yscale="linear" if y == "exact" else "log")
        each.set_xscale("symlog", linthresh=1e4) if x == "moved_bytes" else each.set_xscale("log", base=2)
        each.grid(alpha=0.3)
    for each in axes.flat[len(panels) :]:
        each.axis("off")
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
    """Returns by what a policy stands among others, given its rows."""
    return rows[0]["policy"] not in FIRST, -np.mean([row["exact"] for row in rows]), np.mean([row["error"] for row in rows])


def _points(rows: list[dict], x: str, y: str) -> list[list[float]]:
    """Returns what a policy's rows are in the mean, for each budget or length."""
    points = defaultdict(list)
    for row in rows:
        if row[y] is not None and (y != "error" or row[y] > NO_ERROR):
            at = row["length"] if x == "length" else row["budget"]
            points[at].append((row[x] or row["attended"] if x == "tokens" else row[x], row[y]))
    return sorted(np.mean(of, axis=0).tolist() for of in points.values())
