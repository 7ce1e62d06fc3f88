"""How many CUDA graphs a decode step is, and what stands outside of them, read from what XLA dumps."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

LISTING = "*jit_step*.thunk_sequence_after_thunk_passes.txt"
GRAPH = "kCommandBuffer"
_THUNK = re.compile(r"^( *)\d+: (k\w+)", re.MULTILINE)


def counted(dump: Path) -> list[dict]:
    """Returns of every decode program in a dump, in the order of compilation, its `graphs`, kernels and what is `outside`."""
    return [of_listing(file.read_text()) for file in sorted(dump.glob(LISTING))]


def of_listing(text: str) -> dict:
    """Returns how many graphs a listing of thunks launches, the kernels in all, and the kinds that stand outside of graphs.

    What stands inside a condition or a loop outside of a graph counts once.
    """
    graphs, kernels, outside = 0, 0, Counter()
    inside = None  # the indentation of the graph that a line stands in
    for indent, kind in _THUNK.findall(text):
        if inside is not None and len(indent) <= inside:
            inside = None
        kernels += kind in ("kCustomKernel", "kKernel", "kGemm", "kCublasLtMatmul", "kCuDnn", "kCustomCall")
        if kind == GRAPH:
            graphs, inside = graphs + 1, len(indent)
        elif inside is None:
            outside[kind] += 1
    return dict(graphs=graphs, kernels=kernels, outside=dict(outside.most_common()))
