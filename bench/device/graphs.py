"""How many CUDA graphs a decode step is, and what stands outside of them, read from what XLA dumps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bench.program import thunks

LISTING = "*jit_step*.thunk_sequence_after_thunk_passes.txt"
GRAPH = "kCommandBuffer"


def counted(dump: Path) -> list[dict]:
    """Returns of every decode program in a dump, in the order of compilation, its `graphs`, kernels and what is `outside`."""
    return [of_listing(file.read_text()) for file in sorted(dump.glob(LISTING), key=_number)]


def of_listing(text: str) -> dict:
    """Returns how many graphs a listing of thunks launches, the kernels in all, and the kinds that stand outside of graphs.

    What stands inside a condition or a loop outside of a graph counts once.
    """
    found = [*_flat(thunks.parse(text, ""), inside=False)]
    outside = Counter(kind for kind, inside in found if not inside and kind != GRAPH)
    kinds = [kind for kind, _ in found]
    kernels = sum(kind in thunks.KERNELS for kind in kinds)
    return dict(graphs=kinds.count(GRAPH), kernels=kernels, outside=dict(outside.most_common()))


def _number(file: Path) -> int:
    """Returns the number of a module, by which names do not sort: they have four digits, and more from 10,000 on."""
    return int(re.match(r"module_(\d+)", file.name)[1])


def _flat(some: list[thunks.Thunk], *, inside: bool) -> Iterator[tuple[str, bool]]:
    """Yields the kind of every thunk, and whether it stands in a graph."""
    for thunk in some:
        yield thunk.kind, inside
        yield from _flat(thunk.inner, inside=inside or thunk.kind == GRAPH)
