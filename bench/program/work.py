"""What a program has to do, in order, with bytes and scopes: of a GPU its thunks, of a TPU its scheduled instructions."""

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
    """One thing to do.

    Attributes:
        kind: `kernel`, `select` (RAFT), `copy` on the device, `start` and `wait` of a copy from or to the host, `prefetch` of
            a TPU's memory near its cores, `graph`, `branch` (a condition that the host reads), `loop`, `call` (of the host).
        after: names of the work that must be done before.
        inner: what it launches; of a branch the part that is taken, of a loop one round.
        times: rounds of a loop; None: known to the running program alone, and counted as one.
        pair: what a start and its wait have in common.
        captured: whether the device reads the condition of a branch or loop itself, and not the host.
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
    """Returns the work of thunks. Of a condition's branches the one without a loop is taken, else the first."""
    places = {x.name: computation for computation in module.computations.values() for x in computation.values()}
    return list(_of_thunks(module, listed, scopes, places, graph=False))


def _of_thunks(module: Module, listed: list[Thunk], scopes: dict[str, str], places: dict, *, graph: bool) -> Iterator[Work]:
    for thunk in listed:
        computation = places.get(thunk.instruction)
        instruction = computation[thunk.instruction] if computation is not None else None
        inside = graph or thunk.kind == "kCommandBuffer"

        def inner(some: list[Thunk], inside: bool = inside) -> tuple[Work, ...]:
            return tuple(_of_thunks(module, some, scopes, places, graph=inside))

        if thunk.kind == "kCommandBuffer":
            yield Work("graph", inner=inner(thunk.inner))
        elif thunk.kind == "kSequential":
            yield from inner(thunk.inner)
        elif thunk.kind == "kConditional":
            names = list(dict.fromkeys(x.branch for x in thunk.inner))
            branches = [[x for x in thunk.inner if x.branch == name] for name in names]
            straight = [x for x in branches if not any(y.kind == "kWhile" for y in x)]
            taken = (straight or branches or [[]])[0]
            yield Work("branch", thunk.instruction, captured=graph, inner=inner(taken))
        elif thunk.kind == "kWhile":
            times = hlo.trips(module, instruction) if instruction is not None else None
            yield Work("loop", thunk.instruction, captured=graph, inner=inner(thunk.inner), times=times)
        elif thunk.kind == "kAsyncStart":
            for copy in inner(thunk.inner):
                made_in = scopes.get(copy.after[0]) if copy.after else None  # XLA's own copies have no scope
                scope = made_in or "other" if copy.scope == "other" else copy.scope
                yield Work("start", copy.name, scope, copy.traffic, copy.after, pair=thunk.pair)
        elif thunk.kind == "kAsyncDone":
            yield Work("wait", pair=thunk.pair)
        elif thunk.kind.startswith("kHost"):
            yield Work("call", thunk.instruction, scopes.get(thunk.instruction, "other"))
        elif instruction is not None:
            moved = hlo.traffic(module, computation, instruction)
            kind = {"kCopy": "copy", "kSelectK": "select"}.get(thunk.kind, "kernel" if thunk.kind in thunks.KERNELS else "")
            if kind and (kind != "copy" or moved.device or moved.bus):  # an empty array's copy is nothing
                after = tuple(_sources(computation, instruction))
                yield Work(kind, instruction.name, scopes.get(instruction.name, "other"), moved, after)


def _sources(computation: dict[str, Instruction], instruction: Instruction) -> Iterator[str]:
    """Yields the names of what makes the operands, through what only renames it."""
    for name in instruction.operands:
        source = computation.get(name)
        if source is not None and source.opcode in FREE:
            yield from _sources(computation, source)
        elif source is not None:
            yield name


def of_tpu(module: Module, scopes: dict[str, str], computation: str | None = None) -> list[Work]:
    """Returns the work of a computation, that of the program if none is named, in the order in which it is scheduled.

    What makes a single number is left to the scalar core, which does it beside the rest.
    """
    place = module.computations[computation or module.entry]
    found = []
    for x in place.values():
        scope, host = scopes.get(x.name, "other"), any(array.space == HOST for array in x.arrays)
        if x.opcode.endswith("-start"):
            kind = "start" if host else "prefetch"
            found.append(Work(kind, x.name, scope, hlo.traffic(module, place, x), pair=x.name))
        elif x.opcode.endswith("-done"):
            if any(array.space == HOST for array in place[x.operands[0]].arrays):
                found.append(Work("wait", x.name, scope, pair=x.operands[0]))
        elif x.opcode == "while":
            body = x.attribute(r"body=%?([\w.-]+)")
            inner = tuple(of_tpu(module, scopes, body))
            found.append(Work("loop", x.name, scope, inner=inner, times=hlo.trips(module, x), captured=True))
        elif x.opcode == "conditional":
            inner = tuple(of_tpu(module, scopes, _taken(module, x)))
            found.append(Work("branch", x.name, scope, inner=inner, captured=True))
        elif x.opcode not in FREE and any(array.elements > 1 for array in x.arrays) and not _reserved(x):
            found.append(Work("kernel", x.name, scope, hlo.traffic(module, place, x)))
    return found


def _reserved(x: Instruction) -> bool:
    """Says whether it is but a piece of memory."""
    return x.attribute(r'custom_call_target="(\w+)"') == "AllocateBuffer"


def _taken(module: Module, conditional: Instruction) -> str:
    """Returns the branch without a loop, else the first."""
    several = conditional.attribute(r"branch_computations=\{([^}]*)\}") or ""
    both = (conditional.attribute(rf"{side}_computation=%?([\w.-]+)") for side in ("true", "false"))
    names = [x.strip().lstrip("%") for x in several.split(",") if x.strip()] or [x for x in both if x]
    straight = [x for x in names if not any(y.opcode == "while" for y in module.computations[x].values())]
    return (straight or names)[0]


def flat(some: list[Work] | tuple[Work, ...], times: int = 1) -> Iterator[tuple[Work, int]]:
    """Yields everything that is done with how often it is."""
    for work in some:
        yield work, times
        yield from flat(work.inner, times * (1 if work.times is None else work.times))


def counts(some: list[Work]) -> dict[str, int]:
    """Returns how much of each kind a step runs, and how often the host has to wait for the device (`blocking`)."""
    found: Counter[str] = Counter()
    for work, times in flat(some):
        found[work.kind] += times
        if not work.captured and (work.kind in ("branch", "call") or (work.kind == "loop" and work.times is None)):
            found["blocking"] += times
    return dict(found)


def launches(some: list[Work] | tuple[Work, ...]) -> int:
    """Returns how many things the host launches in a step of a GPU: graphs, and what is in none."""
    found = 0
    for work in some:
        times = 1 if work.times is None else work.times
        found += launches(work.inner) * times if work.kind in ("branch", "loop") and not work.captured else work.kind != "wait"
    return found


def by_scope(some: list[Work]) -> dict[str, dict[str, int]]:
    """Returns of every scope the kernels, the bytes moved on the device and those over the bus."""
    found: dict[str, dict[str, int]] = {}
    for work, times in flat(some):
        row = found.setdefault(work.scope, dict(kernels=0, device_bytes=0, bus_bytes=0))
        row["kernels"] += times * (work.kind in ("kernel", "select"))
        row["device_bytes"] += times * work.traffic.device
        row["bus_bytes"] += times * (work.traffic.bus_in + work.traffic.bus_out)
    return {scope: row for scope, row in found.items() if any(row.values())}


def serial_waits(some: list[Work] | tuple[Work, ...]) -> int:
    """Returns how often a copy from or to the host is waited for while no other is on its way."""
    waits, flying = 0, set()
    for work in some:
        if work.kind == "start":
            flying.add(work.pair)
        elif work.kind == "wait" and work.pair in flying:
            waits += len(flying) == 1
            flying.clear()
        waits += serial_waits(work.inner) * (1 if work.times is None else work.times)
    return waits
