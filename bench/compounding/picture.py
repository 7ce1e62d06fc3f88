"""The plot of `bench.compounding`: KL and agreement by step, a row of panels per model, length and number of steps."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from bench.compounding.page import MISPLACED, grouped
from bench.compounding.steps import BIN

PANELS = (
    ("kl", "along the full cache's text", "KL of the next token, nats"),
    ("own_kl", "along the policy's own text", ""),
    ("agreement", "along the full cache's text", "share of steps that agree"),
)
LEAST = 1e-9  # KL; a smaller one is rounding, and a logarithm has no zero


def draw(found: Iterable[dict], path: Path) -> None:
    """Draws means over seeds, with a band from the least to the largest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    sections = grouped(found)
    figure, axes = plt.subplots(len(sections), 3, figsize=(18, 5 * len(sections)), layout="constrained", squeeze=False)
    for ((model, length, steps), groups), panels in zip(sections.items(), axes, strict=True):
        for (field, along, label), panel in zip(PANELS, panels, strict=True):
            for group in groups:
                if not group[0]["policy"].startswith(MISPLACED):
                    values = np.asarray([row[field] for row in group])
                    values = values if field == "agreement" else np.maximum(values, LEAST)
                    middle = BIN * (np.arange(values.shape[1]) + 0.5)
                    (line,) = panel.plot(middle, values.mean(0), label=f"{group[0]['policy']}, {group[0]['budget']}")
                    panel.fill_between(middle, values.min(0), values.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
            panel.set(xlabel=f"step, {along}", ylabel=label, title=f"{model}, {length:,} tokens and {steps:,} steps")
            panel.set(yscale="linear" if field == "agreement" else "log")
            panel.grid(alpha=0.3)
        panels[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    part = path.with_name(f".{path.name}.part")
    figure.savefig(part, dpi=90, format=path.suffix[1:])
    plt.close(figure)
    part.replace(path)
