"""Parses XLA:GPU's dump of its thunks, the operations that it launches: for `bench.program` and `bench.device`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

KERNELS = ("kCustomKernel", "kKernel", "kGemm", "kCublasLtMatmul", "kCuDnn", "kCustomCall", "kConvolution", "kTriangularSolve")
_THUNK = re.compile(r"^( *)(\d+): (k\w+)\s*(?:\[[^\]]*\])?\s*(.*)$")
_HEADER = re.compile(r"^\s*(\w+):\s*$")


@dataclass
class Thunk:
    """One operation that is launched, or a graph, conditional or loop that launches others.

    Attributes:
        kind: XLA's name of the kind, as `kKernel`.
        instruction: the name of its instruction; empty for a graph.
        branch: in a conditional or loop, the part that it belongs to; else empty.
        pair: the id that start and end of an asynchronous operation share; else empty.
        inner: the thunks that it launches.
    """

    kind: str
    instruction: str
    branch: str = ""
    pair: str = ""
    inner: list[Thunk] = field(default_factory=list)


def parse(listing: str, names: str) -> list[Thunk]:
    """Returns the thunks of a dump.

    For example, the lines `000: kCommandBuffer` and, indented, `001: kKernel` are one graph with one kernel inside.

    Args:
        listing: the text of `*.thunk_sequence_after_thunk_passes.txt`; inner thunks are indented.
        names: the text of `*.thunk_metadata.txt`.
    """
    by_number = _names(names)
    top = Thunk("kSequential", "")
    stack, header = [(-1, top)], ""
    for line in listing.splitlines():
        if match := _THUNK.match(line):
            indent, number, kind, details = len(match[1]), int(match[2]), match[3], match[4]
            while stack[-1][0] >= indent:
                stack.pop()
            parent = stack[-1][1]
            if parent.kind in ("kConditional", "kWhile"):
                # Indentation does not show the branch of these lines; the last header above them does.
                branch = header or (parent.inner[-1].branch if parent.inner else "")
            else:
                branch = ""
            header = ""
            pair = re.search(r"async_id=(\d+)", details)
            thunk = Thunk(kind, by_number.get(number, "") if kind != "kCommandBuffer" else "", branch, pair[1] if pair else "")
            parent.inner.append(thunk)
            stack.append((indent, thunk))
        elif match := _HEADER.match(line):
            header = match[1]
    return top.inner


def _names(text: str) -> dict[int, str]:
    names = {}
    for block in text.split("thunk_metadata {")[1:]:
        name, number = re.search(r'profile_annotation: "([^"]*)"', block), re.search(r"thunk_id: (\d+)", block)
        if name is not None and number is not None:
            names[int(number[1])] = name[1]
    return names
