"""Parses the text of an optimized XLA program (HLO), and counts the bytes that each instruction moves: for `bench.program`.

For example, `%sum = f32[4,8]{1,0:S(5)} add(%x, %y)` is the instruction `sum` with opcode `add`, operands x and y, and one array
of 128 bytes in memory space 5, which is host memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

SIZES = dict(
    pred=1, s4=0.5, u4=0.5, f4e2m1fn=0.5, s8=1, u8=1, s16=2, u16=2, f16=2, bf16=2, s32=4, u32=4, f32=4, s64=8, u64=8, f64=8
)
DEVICE, HOST = 0, 5  # memory spaces; others, such as a TPU's vector memory, are near the cores and count as free
_ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16|f[48]\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.*)$")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_PARTS = ("dynamic-slice", "gather", "slice")  # opcodes that read only a part of their first operand
_SAME = ("bitcast", "reshape")  # opcodes that move nothing
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "ragged-all-to-all")


@dataclass(frozen=True)
class Array:
    """An array that an instruction makes; `space` is its memory space."""

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
    """An instruction of a program.

    Attributes:
        arrays: the arrays that it makes, all parts of a tuple.
        operands: names of its operands; for a parameter its number, for a constant its value.
        text: the text of its attributes.
        root: whether it makes the result of its computation.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    text: str
    root: bool = False

    def attribute(self, pattern: str) -> str | None:
        """Returns the first group of a pattern's match in the attributes; None without a match."""
        match = re.search(pattern, self.text)
        return match[1] if match else None

    @property
    def calls(self) -> str | None:
        """The computation that a fusion runs."""
        return self.attribute(r"calls=%?([\w.-]+)")


@dataclass(frozen=True)
class Module:
    """A program.

    Attributes:
        computations: the instructions of every computation, by name, in order.
        entry: name of the computation that the program runs.
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
        """Bytes of the busier direction, because the bus moves both at once."""
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
        elif current is not None and (match := _LINE.match(line)):
            current[match[2]] = _instruction(match[2], match[3], root=bool(match[1]))
    return Module(computations, entry)


def _closing(text: str) -> int:
    """Returns the index of the parenthesis that closes the first one; 5 for "(a(b))c"."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i
    return len(text)


def _instruction(name: str, text: str, *, root: bool) -> Instruction:
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    result_type, (opcode, after_opcode) = text[:end], text[end:].lstrip().split("(", 1)
    end = _closing("(" + after_opcode)
    operands = re.findall(r"%([\w.-]+)", after_opcode[: end - 1])
    if opcode in ("parameter", "constant"):  # a parameter's number, or a constant's value
        operands = [after_opcode[: end - 1]]
    return Instruction(name, opcode, _arrays(result_type), tuple(operands), after_opcode[end:], root)


def _arrays(result_type: str) -> tuple[Array, ...]:
    arrays = []
    for dtype, dims, layout in _ARRAY.findall(result_type):
        space = re.search(r"S\((\d+)\)", layout)
        arrays.append(Array(dtype, tuple(int(n) for n in dims.split(",") if n), int(space[1]) if space else DEVICE))
    return tuple(arrays)


def traffic(module: Module, computation: dict[str, Instruction], instruction: Instruction) -> Traffic:
    """Returns the bytes that an instruction moves; of a sliced or updated array only the slice or the update counts."""
    if instruction.opcode.removesuffix("-start") in COLLECTIVES:
        return Traffic(device=2 * sum(x.nbytes for x in instruction.arrays if x.space == DEVICE))  # read and written
    if instruction.opcode.endswith("-start"):
        return _started(instruction, computation)
    operands = [computation[name] for name in instruction.operands if name in computation]
    called = module.computations.get(instruction.calls) if instruction.opcode == "fusion" else None
    result_sizes = [x.nbytes for x in instruction.arrays]
    if called is not None:
        read_sizes, written_sizes = _parts(module, called, len(operands)), _written(called, result_sizes)
    elif instruction.opcode in _PARTS:
        read_sizes, written_sizes = [sum(result_sizes)] + [None] * (len(operands) - 1), result_sizes
    elif instruction.opcode == "dynamic-update-slice":
        read_sizes, written_sizes = [0, None], [operands[1].arrays[0].nbytes]
    else:
        # Our own kernels take the whole pool as an operand, and read as many bytes of it as they write.
        read_sizes, written_sizes = (
            [sum(result_sizes) if x.arrays and x.arrays[0].space == HOST else None for x in operands],
            result_sizes,
        )
    totals = [0, 0, 0]
    for operand, part in zip(operands, read_sizes, strict=False):
        for array in operand.arrays:
            count = array.nbytes if part is None else min(part, array.nbytes)
            if array.space in (DEVICE, HOST):
                totals[0 if array.space == DEVICE else 1] += count
    for array, count in zip(instruction.arrays, written_sizes, strict=False):
        if array.space in (DEVICE, HOST):
            totals[0 if array.space == DEVICE else 2] += count
    return Traffic(*totals)


def _started(start: Instruction, computation: dict[str, Instruction]) -> Traffic:
    """Returns the bytes of an asynchronous copy: the smaller of its source and its target."""
    source, target = computation[start.operands[0]].arrays[0], _target(start)
    count = min(source.nbytes, target.nbytes)
    into, out = (count if x.space == HOST else 0 for x in (source, target))
    return Traffic(count if DEVICE in (source.space, target.space) else 0, into, out)


def _target(x: Instruction) -> Array | None:
    """Returns the array that an instruction makes, for a tuple the first; None if it makes none."""
    if not x.opcode.endswith("-start") or x.opcode == "copy-start":  # (target, source, flag)
        return x.arrays[0] if x.arrays else None
    return x.arrays[len(x.operands)] if len(x.arrays) > len(x.operands) else None  # ((operands), target, flag)


def _parts(module: Module, called: dict[str, Instruction], count: int) -> list[int | None]:
    """Returns the bytes that a computation reads of each parameter; None for the whole parameter."""
    sizes: list[int | None] = [None] * count
    for instruction in called.values():
        if instruction.opcode == "parameter" and int(instruction.operands[0]) < count:
            sizes[int(instruction.operands[0])] = _part(module, called, instruction.name)
    return sizes


def _part(module: Module, called: dict[str, Instruction], name: str) -> int | None:
    """Returns the bytes that a computation reads of one of its arrays; None for the whole array."""
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
        elif user.opcode in ("dynamic-update-slice", "scatter") and first:  # in place: reads of its result count
            part = _part(module, called, user.name)
        elif user.root and user.opcode == "tuple" and called[name].opcode in ("dynamic-update-slice", "scatter"):
            part = 0
        else:
            part = None
        if part is None:
            return None
        total += part
    return total


def _written(called: dict[str, Instruction], result_sizes: list[int]) -> list[int]:
    """Returns the bytes that a computation writes to each result; only the update of a result that is updated in place."""
    (root,) = [x for x in called.values() if x.root]
    roots = [called[name] for name in root.operands] if root.opcode == "tuple" else [root]
    sizes = []
    for size, result in zip(result_sizes, roots, strict=False):
        while result.opcode in _SAME:
            result = called[result.operands[0]]
        update = {"dynamic-update-slice": 1, "scatter": len(result.operands) - 1}.get(result.opcode)
        sizes.append(size if update is None else sum(x.nbytes for x in called[result.operands[update]].arrays))
    return sizes


def trips(module: Module, loop: Instruction) -> int | None:
    """Returns how often a loop runs; None if the text does not say."""
    trip_count = loop.attribute(r'known_trip_count":\{"n":"(\d+)"')
    if trip_count is not None:
        return int(trip_count)
    condition = module.computations[loop.attribute(r"condition=%?([\w.-]+)")]
    (root,) = [x for x in condition.values() if x.root]
    if root.opcode != "compare" or "direction=LT" not in root.text:
        return None
    bound = condition[root.operands[1]]  # XLA:TPU states no trip count; JAX's loops count from 0
    return int(bound.operands[0]) if bound.opcode == "constant" else None


def collectives(module: Module) -> list[tuple[str, Instruction]]:
    """Returns all instructions that move data between devices, each with its opcode without `-start`."""
    named = ((x.opcode.removesuffix("-start"), x) for x in module.all())
    return [(opcode, x) for opcode, x in named if opcode in COLLECTIVES]


def pool_copies(module: Module, shape: tuple[int, ...], itemsize: int) -> list[str]:
    """Returns the names of instructions that make an array of the pool's number of elements and bytes."""
    skipped = ("parameter", "bitcast", "get-tuple-element", "tuple", "while", "conditional", "copy-done")
    targets = ((x, _target(x)) for x in module.all() if x.opcode not in skipped)
    pool_size = (math.prod(shape), math.prod(shape) * itemsize)
    return [x.name for x, array in targets if array is not None and (array.elements, array.nbytes) == pool_size]
