"""The picture of `bench.compare --model`: KL of the next token against bytes, a row of panels per model and length."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from bench.compare.forced_page import CODES, OURS, order
from bench.compare.rows import FIRST

PANELS = (
    ("device_bytes", "kl", "cache on the device, MiB", "KL of the next token, nats"),
    ("moved_bytes", "kl", "moved from the host per step, MiB", ""),
    ("device_bytes", "error", "cache on the device, MiB", "relative error of attention"),
)
LEAST = dict(kl=1e-9, error=1e-6)  # smaller ones are rounding, and are not drawn


def draw(rows: list[dict], path: Path) -> None:
    """Draws the rows; the legend names a policy once, and a line joins a policy's budgets."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cells = sorted({(row["model"], row["length"]) for row in rows})
    policies = list(dict.fromkeys(row["policy"] for row in sorted(rows, key=order) if row["policy"] != "full"))
    figure, axes = plt.subplots(len(cells), 3, figsize=(18, 5.5 * max(1, len(cells))), layout="constrained", squeeze=False)
    colours, markers = plt.get_cmap("turbo"), "osv^<>DPX*hd"
    for (model, length), panels in zip(cells, axes, strict=True):
        group = [row for row in rows if (row["model"], row["length"]) == (model, length)]
        for (x, y, xlabel, ylabel), panel in zip(PANELS, panels, strict=True):
            points = defaultdict(list)
            for row in group:
                if row[y] > LEAST[y] and (x != "moved_bytes" or row[x] > 0):
                    points[row["policy"]].append((row[x] / 2**20, row[y]))
            for i, name in enumerate(policies):
                if name in points:
                    base = name.partition(":")[0]
                    ours, known = base in OURS, base in (*CODES, *FIRST)
                    colour = "black" if ours else "tab:red" if known else colours(0.05 + 0.9 * i / max(1, len(policies) - 1))
                    style = dict(color=colour, linewidth=2.5 if ours else 1, zorder=3 if ours else 2)
                    style |= dict(marker=markers[i % len(markers)], markersize=8)
                    panel.plot(*zip(*sorted(points[name]), strict=True), label=name, **style)
            panel.set(xlabel=xlabel, ylabel=ylabel, xscale="log", yscale="log", title=f"{model}, {length:,} tokens")
            panel.grid(alpha=0.3)
    handles = {label: handle for panel in axes.flat for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    names = [name for name in policies if name in handles]
    figure.legend([handles[name] for name in names], names, loc="outside right center", frameon=False)
    part = path.with_name(f".{path.name}.part")
    figure.savefig(part, dpi=90, format=path.suffix[1:])
    plt.close(figure)
    part.replace(path)
