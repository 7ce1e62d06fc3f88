"""The work of a program in order, with bytes and scopes: a GPU's thunks, a TPU's instructions. For `bench.program`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from bench.program import hlo, thunks
from bench.program.hlo import HOST, Instruction, Module, Traffic
from bench.program.thunks import Thunk

FREE = (
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "opt-barrier", "partition-id", "iota",
    "add-dependency", "copy-done", "slice-done", "dynamic-slice-done", "async-done", "async-update",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """One operation, or a graph, branch or loop of operations.

    Attributes:
        kind: `kernel`, `select` (RAFT's selection), `copy` on the device, `start` and `wait` of a copy from or to the host,
            `prefetch` into a TPU's memory near its cores, `graph`, `branch` (a condition), `loop`, `call` (of a function on
            the host).
        name: its instruction's name.
        scope: its named scope.
        traffic: the bytes that it moves.
        after: names of the work that must be done before.
        inner: the work inside; for a branch the assumed part, for a loop one round.
        times: rounds of a loop; None if only the running program knows, and then counted as one.
        pair: the id that a start and its wait share.
        captured: whether the device reads the condition of a branch or loop, so the host does not wait.
    """

    kind: str
    name: str = ""
    scope: str = "other"
    traffic: Traffic = Traffic()
    after: tuple[str, ...] = ()
    inner: tuple[Work, ...] = ()
    times: int | None = 1
    pair: str = ""
    captured: bool = False


def of_gpu(module: Module, listed: list[Thunk], scopes: dict[str, str]) -> list[Work]:
    """Returns the work of thunks; a condition is assumed to take its first branch without a loop, else its first."""
    places = {x.name: computation for computation in module.computations.values() for x in computation.values()}
    return list(_of_thunks(module, listed, scopes, places, graph=False))


def _of_thunks(module: Module, thunk_list: list[Thunk], scopes: dict[str, str], places: dict, *, graph: bool) -> Iterator[Work]:
    for thunk in thunk_list:
        computation = places.get(thunk.instruction)
        instruction = computation[thunk.instruction] if computation is not None else None
        in_graph = graph or thunk.kind == "kCommandBuffer"

        def inner(inner_thunks: list[Thunk], in_graph: bool = in_graph) -> tuple[Work, ...]:
            return tuple(_of_thunks(module, inner_thunks, scopes, places, graph=in_graph))

        if thunk.kind == "kCommandBuffer":
            yield Work("graph", inner=inner(thunk.inner))
        elif thunk.kind == "kSequential":
            yield from inner(thunk.inner)
        elif thunk.kind == "kConditional":
            names = list(dict.fromkeys(x.branch for x in thunk.inner))
            branches = [[x for x in thunk.inner if x.branch == name] for name in names]
            without_loops = [x for x in branches if not any(y.kind == "kWhile" for y in x)]
            branch = (without_loops or branches or [[]])[0]
            yield Work("branch", thunk.instruction, captured=graph, inner=inner(branch))
        elif thunk.kind == "kWhile":
            times = hlo.trips(module, instruction) if instruction is not None else None
            yield Work("loop", thunk.instruction, captured=graph, inner=inner(thunk.inner), times=times)
        elif thunk.kind == "kAsyncStart":
            for copy in inner(thunk.inner):
                source_scope = scopes.get(copy.after[0]) if copy.after else None  # XLA's own copies have no scope
                scope = source_scope or "other" if copy.scope == "other" else copy.scope
                yield Work("start", copy.name, scope, copy.traffic, copy.after, pair=thunk.pair)
        elif thunk.kind == "kAsyncDone":
            yield Work("wait", pair=thunk.pair)
        elif thunk.kind.startswith("kHost"):
            yield Work("call", thunk.instruction, scopes.get(thunk.instruction, "other"))
        elif instruction is not None:
            traffic = hlo.traffic(module, computation, instruction)
            kind = {"kCopy": "copy", "kSelectK": "select"}.get(thunk.kind, "kernel" if thunk.kind in thunks.KERNELS else "")
            if kind and (kind != "copy" or traffic.device or traffic.bus):  # a copy of an empty array does no work
                sources = tuple(_sources(computation, instruction))
                yield Work(kind, instruction.name, scopes.get(instruction.name, "other"), traffic, sources)


def _sources(computation: dict[str, Instruction], instruction: Instruction) -> Iterator[str]:
    """Yields the names of instructions that compute the operands, after instructions that only rename arrays."""
    for name in instruction.operands:
        source = computation.get(name)
        if source is not None and source.opcode in FREE:
            yield from _sources(computation, source)
        elif source is not None:
            yield name


def of_tpu(module: Module, scopes: dict[str, str], computation: str | None = None) -> list[Work]:
    """Returns the work of a computation, by default the program's entry, in scheduled order.

    Instructions that make a single number are left out: the scalar core runs them beside the other work.
    """
    instructions = module.computations[computation or module.entry]
    works = []
    for x in instructions.values():
        scope, host = scopes.get(x.name, "other"), any(array.space == HOST for array in x.arrays)
        if x.opcode.endswith("-start"):
            kind = "start" if host else "prefetch"
            works.append(Work(kind, x.name, scope, hlo.traffic(module, instructions, x), pair=x.name))
        elif x.opcode.endswith("-done"):
            if any(array.space == HOST for array in instructions[x.operands[0]].arrays):
                works.append(Work("wait", x.name, scope, pair=x.operands[0]))
        elif x.opcode == "while":
            body = x.attribute(r"body=%?([\w.-]+)")
            inner = tuple(of_tpu(module, scopes, body))
            works.append(Work("loop", x.name, scope, inner=inner, times=hlo.trips(module, x), captured=True))
        elif x.opcode == "conditional":
            inner = tuple(of_tpu(module, scopes, _taken(module, x)))
            works.append(Work("branch", x.name, scope, inner=inner, captured=True))
        elif x.opcode not in FREE and any(array.elements > 1 for array in x.arrays) and not _reserved(x):
            works.append(Work("kernel", x.name, scope, hlo.traffic(module, instructions, x)))
    return works


def _reserved(x: Instruction) -> bool:
    """Returns whether an instruction only reserves memory."""
    return x.attribute(r'custom_call_target="(\w+)"') == "AllocateBuffer"


def _taken(module: Module, conditional: Instruction) -> str:
    """Returns the first branch of a conditional without a loop, else its first."""
    listed = conditional.attribute(r"branch_computations=\{([^}]*)\}") or ""
    true_and_false = (conditional.attribute(rf"{side}_computation=%?([\w.-]+)") for side in ("true", "false"))
    names = [x.strip().lstrip("%") for x in listed.split(",") if x.strip()] or [x for x in true_and_false if x]
    without_loops = [x for x in names if not any(y.opcode == "while" for y in module.computations[x].values())]
    return (without_loops or names)[0]


def flat(some: list[Work] | tuple[Work, ...], times: int = 1) -> Iterator[tuple[Work, int]]:
    """Yields all work, the inner work too, with the number of times that a step runs it."""
    for work in some:
        yield work, times
        yield from flat(work.inner, times * (1 if work.times is None else work.times))


def counts(some: list[Work]) -> dict[str, int]:
    """Returns how often a step runs each kind of work, and how often the host waits for the device (`blocking`)."""
    totals: Counter[str] = Counter()
    for work, times in flat(some):
        totals[work.kind] += times
        if not work.captured and (work.kind in ("branch", "call") or (work.kind == "loop" and work.times is None)):
            totals["blocking"] += times
    return dict(totals)


def launches(some: list[Work] | tuple[Work, ...]) -> int:
    """Returns the number of launches by the host in a GPU's step: graphs, and work outside of graphs."""
    total = 0
    for work in some:
        times = 1 if work.times is None else work.times
        total += launches(work.inner) * times if work.kind in ("branch", "loop") and not work.captured else work.kind != "wait"
    return total


def by_scope(some: list[Work]) -> dict[str, dict[str, int]]:
    """Returns the kernels, the bytes moved on the device and the bytes over the bus, by scope."""
    rows: dict[str, dict[str, int]] = {}
    for work, times in flat(some):
        row = rows.setdefault(work.scope, dict(kernels=0, device_bytes=0, bus_bytes=0))
        row["kernels"] += times * (work.kind in ("kernel", "select"))
        row["device_bytes"] += times * work.traffic.device
        row["bus_bytes"] += times * (work.traffic.bus_in + work.traffic.bus_out)
    return {scope: row for scope, row in rows.items() if any(row.values())}


def serial_waits(some: list[Work] | tuple[Work, ...]) -> int:
    """Returns how often a step waits for a copy from or to the host while no other copy is under way."""
    waits, flying = 0, set()
    for work in some:
        if work.kind == "start":
            flying.add(work.pair)
        elif work.kind == "wait" and work.pair in flying:
            waits += len(flying) == 1
            flying.clear()
        waits += serial_waits(work.inner) * (1 if work.times is None else work.times)
    return waits
