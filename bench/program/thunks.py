"""Reads what XLA:GPU launches, as it dumps it after its last pass."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

KERNELS = ("kCustomKernel", "kKernel", "kGemm", "kCublasLtMatmul", "kCuDnn", "kCustomCall", "kConvolution", "kTriangularSolve")
_THUNK = re.compile(r"^( *)(\d+): (k\w+)\s*(?:\[[^\]]*\])?\s*(.*)$")
_HEADER = re.compile(r"^\s*(\w+):\s*$")


@dataclass
class Thunk:
    """One thing that is launched, or what launches others.

    Attributes:
        instruction: the name of the instruction it was made of; empty for a graph.
        branch: of what stands in a conditional or a loop, in which part of it.
        pair: what start and end of something asynchronous have in common.
    """

    kind: str
    instruction: str
    branch: str = ""
    pair: str = ""
    inner: list[Thunk] = field(default_factory=list)


def parse(listing: str, names: str) -> list[Thunk]:
    """Returns the thunks of a dump.

    Args:
        listing: the text of `*.thunk_sequence_after_thunk_passes.txt`; what is inside another thunk is indented.
        names: the text of `*.thunk_metadata.txt`.
    """
    known = _names(names)
    top = Thunk("kSequential", "")
    stack, header = [(-1, top)], ""
    for line in listing.splitlines():
        if found := _THUNK.match(line):
            indent, number, kind, rest = len(found[1]), int(found[2]), found[3], found[4]
            while stack[-1][0] >= indent:
                stack.pop()
            parent = stack[-1][1]
            if parent.kind in ("kConditional", "kWhile"):
                # The dump's indentation of these lines does not tell whose they are.
                branch = header or (parent.inner[-1].branch if parent.inner else "")
            else:
                branch = ""
            header = ""
            pair = re.search(r"async_id=(\d+)", rest)
            thunk = Thunk(kind, known.get(number, "") if kind != "kCommandBuffer" else "", branch, pair[1] if pair else "")
            parent.inner.append(thunk)
            stack.append((indent, thunk))
        elif found := _HEADER.match(line):
            header = found[1]
    return top.inner


def _names(text: str) -> dict[int, str]:
    found = {}
    for block in text.split("thunk_metadata {")[1:]:
        name, number = re.search(r'profile_annotation: "([^"]*)"', block), re.search(r"thunk_id: (\d+)", block)
        if name is not None and number is not None:
            found[int(number[1])] = name[1]
    return found
