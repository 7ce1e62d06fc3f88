"""Draws a learning curve: ``python -m bench.needle.curve bench/needle/log.jsonl bench/needle/curve.png [--member NAME]``."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

from bench.needle.members import MEMBERS  # noqa: E402


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--member", choices=MEMBERS, default="bundled", help="whose run it is (default: %(default)s)")
    arguments = parser.parse_args(argv)
    stages = MEMBERS[arguments.member].stages
    rows = [json.loads(line) for line in arguments.log.read_text().splitlines()]
    ends = list(itertools.accumulate(stage.steps * stage.batch * stage.length / 1e6 for stage in stages))
    starts = [0.0, *ends]
    figure, (losses, shares) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    steps = [row for row in rows if "step" in row]
    tokens_seen = [starts[r["stage"]] + r["step"] * stages[r["stage"]].batch * stages[r["stage"]].length / 1e6 for r in steps]
    for name, label in (("text", "text"), ("answer", "answers")):
        losses.plot(tokens_seen, [row[name] for row in steps], label=label)
    losses.set(yscale="log", xlabel="million tokens", ylabel="loss in training, nats per byte")
    losses.legend()
    shares.set_prop_cycle(color=plt.get_cmap("tab20").colors)
    tasks = [row for row in rows if "task" in row]
    for name, length in sorted({(row["task"], row["length"]) for row in tasks}):
        task_rows = [row for row in tasks if (row["task"], row["length"]) == (name, length)]
        shares.plot(
            [ends[row["stage"]] for row in task_rows], [row["exact"] for row in task_rows], "o-", label=f"{name}, {length}"
        )
    shares.set(xlabel="million tokens", ylabel="held-out answers right, teacher-forced", ylim=(-0.02, 1.02))
    shares.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axes in (losses, shares):
        for end in ends:
            axes.axvline(end, color="0.85", zorder=0)
        axes.grid(alpha=0.3)
    figure.savefig(arguments.picture, dpi=110)


if __name__ == "__main__":
    main()
