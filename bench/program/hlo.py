"""Reads an optimized program: its instructions, and the bytes that each moves."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

SIZES = dict(
    pred=1, s4=0.5, u4=0.5, f4e2m1fn=0.5, s8=1, u8=1, s16=2, u16=2, f16=2, bf16=2, s32=4, u32=4, f32=4, s64=8, u64=8, f64=8
)
DEVICE, HOST = 0, 5  # memory spaces; others, such as a TPU's vector memory, are near the cores and cost nothing here
_ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16|f[48]\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.*)$")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_PARTS = ("dynamic-slice", "gather", "slice")  # what reads but a part of its first operand
_SAME = ("bitcast", "reshape")


@dataclass(frozen=True)
class Array:
    dtype: str
    shape: tuple[int, ...]
    space: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return math.ceil(self.elements * SIZES.get(self.dtype, 1))


@dataclass(frozen=True)
class Instruction:
    """An instruction.

    Attributes:
        arrays: what it makes; of a tuple every part.
        text: its attributes.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    text: str
    root: bool = False

    def attribute(self, pattern: str) -> str | None:
        """Returns the first group of a pattern in the attributes, None if it is not there."""
        found = re.search(pattern, self.text)
        return found[1] if found else None

    @property
    def calls(self) -> str | None:
        """The computation that a fusion runs."""
        return self.attribute(r"calls=%?([\w.-]+)")


@dataclass(frozen=True)
class Module:
    """A program.

    Attributes:
        computations: the instructions of every computation, by name, in order.
        entry: the computation that is run.
    """

    computations: dict[str, dict[str, Instruction]]
    entry: str

    def all(self) -> Iterator[Instruction]:
        """Yields the instructions of all computations."""
        for computation in self.computations.values():
            yield from computation.values()


@dataclass(frozen=True)
class Traffic:
    """Bytes that an instruction moves: in the device's memory, and over the bus from and to the host's."""

    device: int = 0
    bus_in: int = 0
    bus_out: int = 0

    @property
    def bus(self) -> int:
        """Bytes of the busier direction: the bus takes both at once."""
        return max(self.bus_in, self.bus_out)


def parse(text: str) -> Module:
    """Returns the program of an HLO text."""
    computations, current, entry = {}, None, ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _LINE.match(line)):
            current[found[2]] = _instruction(found[2], found[3], root=bool(found[1]))
    return Module(computations, entry)


def _closing(text: str) -> int:
    """Returns where the parenthesis that `text` begins with is closed."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i
    return len(text)


def _instruction(name: str, text: str, *, root: bool) -> Instruction:
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    kind, (opcode, rest) = text[:end], text[end:].lstrip().split("(", 1)
    end = _closing("(" + rest)
    operands = re.findall(r"%([\w.-]+)", rest[: end - 1])
    if opcode in ("parameter", "constant"):  # its number, or its value
        operands = [rest[: end - 1]]
    return Instruction(name, opcode, _arrays(kind), tuple(operands), rest[end:], root)


def _arrays(kind: str) -> tuple[Array, ...]:
    found = []
    for dtype, dims, layout in _ARRAY.findall(kind):
        space = re.search(r"S\((\d+)\)", layout)
        found.append(Array(dtype, tuple(int(n) for n in dims.split(",") if n), int(space[1]) if space else DEVICE))
    return tuple(found)


def traffic(module: Module, computation: dict[str, Instruction], instruction: Instruction) -> Traffic:
    """Returns the bytes that an instruction moves; a part that is sliced or updated counts for the whole array."""
    if instruction.opcode.endswith("-start"):
        return _started(instruction, computation)
    operands = [computation[name] for name in instruction.operands if name in computation]
    called = module.computations.get(instruction.calls) if instruction.opcode == "fusion" else None
    made = [x.nbytes for x in instruction.arrays]
    if called is not None:
        parts, written = _parts(module, called, len(operands)), _written(called, made)
    elif instruction.opcode in _PARTS:
        parts, written = [sum(made)] + [None] * (len(operands) - 1), made
    elif instruction.opcode == "dynamic-update-slice":
        parts, written = [0, None], [operands[1].arrays[0].nbytes]
    else:
        # A kernel of our own is given the whole pool, and brings what it makes of it.
        parts, written = [sum(made) if x.arrays and x.arrays[0].space == HOST else None for x in operands], made
    moved = [0, 0, 0]
    for operand, part in zip(operands, parts, strict=False):
        for array in operand.arrays:
            count = array.nbytes if part is None else min(part, array.nbytes)
            if array.space in (DEVICE, HOST):
                moved[0 if array.space == DEVICE else 1] += count
    for array, count in zip(instruction.arrays, written, strict=False):
        if array.space in (DEVICE, HOST):
            moved[0 if array.space == DEVICE else 2] += count
    return Traffic(*moved)


def _started(start: Instruction, computation: dict[str, Instruction]) -> Traffic:
    """Returns the bytes of an asynchronous copy: as many as come of it."""
    source, target = computation[start.operands[0]].arrays[0], _target(start)
    count = min(source.nbytes, target.nbytes)
    into, out = (count if x.space == HOST else 0 for x in (source, target))
    return Traffic(count if DEVICE in (source.space, target.space) else 0, into, out)


def _target(x: Instruction) -> Array | None:
    """Returns what an instruction makes, the first part of a tuple; None if it makes nothing."""
    if not x.opcode.endswith("-start") or x.opcode == "copy-start":  # (target, source, flag)
        return x.arrays[0] if x.arrays else None
    return x.arrays[len(x.operands)] if len(x.arrays) > len(x.operands) else None  # ((operands), target, flag)


def _parts(module: Module, called: dict[str, Instruction], count: int) -> list[int | None]:
    """Returns the bytes that a computation reads of each parameter, None for all of it."""
    found: list[int | None] = [None] * count
    for instruction in called.values():
        if instruction.opcode == "parameter" and int(instruction.operands[0]) < count:
            found[int(instruction.operands[0])] = _part(module, called, instruction.name)
    return found


def _part(module: Module, called: dict[str, Instruction], name: str) -> int | None:
    """Returns the bytes that a computation reads of one of its arrays, None for all of them."""
    total = 0
    users = [x for x in called.values() if x.opcode not in ("parameter", "constant") and name in x.operands]
    for user in users:
        first = user.operands[0] == name and user.operands.count(name) == 1
        inner = module.computations.get(user.calls, {}) if user.opcode == "fusion" else {}
        if user.opcode in _SAME or (inner and all(x.opcode in ("parameter", *_SAME) for x in inner.values())):
            part = None if user.root else _part(module, called, user.name)
        elif inner:
            part = _parts(module, inner, len(user.operands))[user.operands.index(name)]
        elif user.opcode in _PARTS and first:
            part = sum(x.nbytes for x in user.arrays)
        elif user.opcode in ("dynamic-update-slice", "scatter") and first:  # in place; what reads the result reads it
            part = _part(module, called, user.name)
        elif user.root and user.opcode == "tuple" and called[name].opcode in ("dynamic-update-slice", "scatter"):
            part = 0
        else:
            part = None
        if part is None:
            return None
        total += part
    return total


def _written(called: dict[str, Instruction], made: list[int]) -> list[int]:
    """Returns the bytes that a computation writes of each result: of one that is updated in place, the update."""
    (root,) = [x for x in called.values() if x.root]
    roots = [called[name] for name in root.operands] if root.opcode == "tuple" else [root]
    found = []
    for whole, result in zip(made, roots, strict=False):
        while result.opcode in _SAME:
            result = called[result.operands[0]]
        update = {"dynamic-update-slice": 1, "scatter": len(result.operands) - 1}.get(result.opcode)
        found.append(whole if update is None else sum(x.nbytes for x in called[result.operands[update]].arrays))
    return found


def trips(module: Module, loop: Instruction) -> int | None:
    """Returns how often a loop runs, None if only the running program knows."""
    known = loop.attribute(r'known_trip_count":\{"n":"(\d+)"')
    if known is not None:
        return int(known)
    condition = module.computations[loop.attribute(r"condition=%?([\w.-]+)")]
    (root,) = [x for x in condition.values() if x.root]
    if root.opcode != "compare" or "direction=LT" not in root.text:
        return None
    bound = condition[root.operands[1]]  # XLA:TPU says no number; JAX's loops count from 0
    return int(bound.operands[0]) if bound.opcode == "constant" else None


def pool_copies(module: Module, shape: tuple[int, ...], itemsize: int) -> list[str]:
    """Returns the names of the instructions that make an array of as many numbers, as wide, as the pool's `shape`."""
    given = ("parameter", "bitcast", "get-tuple-element", "tuple", "while", "conditional", "copy-done")
    made = ((x, _target(x)) for x in module.all() if x.opcode not in given)
    size = (math.prod(shape), math.prod(shape) * itemsize)
    return [x.name for x, array in made if array is not None and (array.elements, array.nbytes) == size]
