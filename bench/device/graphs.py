"""The number of CUDA graphs in a decode step and the operations outside of them, from XLA's dump: for `bench.device`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bench.program import thunks

LISTING = "*jit_step*.thunk_sequence_after_thunk_passes.txt"
GRAPH = "kCommandBuffer"


def counted(dump: Path) -> list[dict]:
    """Returns the counts of `of_listing` for every decode program in a dump, in order of compilation."""
    return [of_listing(file.read_text()) for file in sorted(dump.glob(LISTING), key=_number)]


def of_listing(text: str) -> dict:
    """Returns the number of graphs and of all kernels in a listing of thunks, and the kinds outside of graphs with counts.

    Thunks in a conditional or loop outside of a graph count once. For example, the lines `000: kCommandBuffer`, inside it
    `001: kKernel`, and then `002: kCopy` give graphs=1, kernels=1 and outside={"kCopy": 1}.
    """
    thunk_kinds = [*_flat(thunks.parse(text, ""), inside=False)]
    outside_counts = Counter(kind for kind, in_graph in thunk_kinds if not in_graph and kind != GRAPH)
    kinds = [kind for kind, _ in thunk_kinds]
    kernels = sum(kind in thunks.KERNELS for kind in kinds)
    return dict(graphs=kinds.count(GRAPH), kernels=kernels, outside=dict(outside_counts.most_common()))


def _number(file: Path) -> int:
    """Returns a module's number; names do not sort by it, because numbers from 10,000 on have more than four digits."""
    return int(re.match(r"module_(\d+)", file.name)[1])


def _flat(thunk_list: list[thunks.Thunk], *, inside: bool) -> Iterator[tuple[str, bool]]:
    """Yields the kind of every thunk, and whether it is in a graph."""
    for thunk in thunk_list:
        yield thunk.kind, inside
        yield from _flat(thunk.inner, inside=inside or thunk.kind == GRAPH)
