"""Estimated time of a compiled step on a device that this machine lacks, low, mid and high: for `bench.program`.

Counts and bytes come from the compiler; every time is an estimate. It rests on the constants in `RATES`, which are never tuned
to a result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import jax

from bench.program.compile import Step, on_host
from bench.program.targets import Target
from bench.program.work import Work
from bench.steps.sizes import fetched_bytes, fetched_per_step, nbytes
from icejax.cache.bases.retrieval import PagedState, Retrieval
from icejax.cache.policies.clustered import Clustered
from icejax.cache.pool.page_format import pool_shapes
from icejax.engine.plan import Plan
from icejax.ops.pages import tree

LEVELS = ("low", "mid", "high")
SHARE = 0.9  # share of the data sheet's bandwidth at which the floor reads device memory


@dataclass(frozen=True)
class Rates:
    """Costs in microseconds, and rates in bytes per microsecond.

    Attributes:
        kernel: time of a small kernel, with the gap before it.
        ramp: time of a large kernel besides its bytes.
        device: rate of the device's memory.
        bus: rate of the bus to host memory, in each direction.
        launch: time to launch a graph, or a selection outside a graph.
        copy: time of a copy to or from the host besides its bytes.
        stall: time of a condition, loop or call for which the host waits for the device.
    """

    kernel: float
    ramp: float
    device: float
    bus: float
    launch: float
    copy: float
    stall: float


# None of these was timed on a device of ours. `kernel`, `device` and `bus` are others' measurements: starts in a graph, and
# XLA's kernels against 4.8 TB/s and PCIe 5. `copy`: a fetch of 3.7 MB that crosses the bus twice took 170 to 215 us, less
# its bytes. `launch`: a step of 121 graphs and 60 selections, estimated at 12 / 16 / 21 ms, less its kernels and fetches.
# `stall`: a guess.
_H200 = (
    Rates(1.6, 0.8, 3.9e6, 52e3, 1, 12, 10),
    Rates(2.3, 0.8, 3.4e6, 45e3, 9, 12, 20),
    Rates(3.2, 0.8, 2.6e6, 38e3, 15, 12, 30),
)


def _scaled(rates: tuple[Rates, ...], *, device: float, bus: float) -> tuple[Rates, ...]:
    return tuple(replace(x, device=x.device * device, bus=x.bus * bus) for x in rates)


def _tpu(bandwidth: float) -> tuple[Rates, ...]:
    levels = zip((0.5, 1.0, 2.0), (0.9, 0.8, 0.7), (25e3, 17e3, 10e3), (2, 3, 4), strict=True)
    return tuple(Rates(kernel, 0, share * bandwidth, bus, 0, copy, 0) for kernel, share, bus, copy in levels)


# An H100 is assumed to be 1.2 ms slower where 18.6 GB are read; an A100 reads at 0.61 of an H100's data sheet, over PCIe 4.
# A TPU's `kernel` and its share of bandwidth are guesses; its copies are published measurements.
RATES = dict(
    h200=_H200,
    h100=_scaled(_H200, device=0.82, bus=1),
    a100=_scaled(_H200, device=0.5, bus=0.5),
    v5e=_tpu(819e3),
    v6e=_tpu(1640e3),
)
_GPU_REASONS = (
    "a kernel takes the larger of its start in a graph ({kernel} us) and its bytes at the device's rate "
    "({device} TB/s, and {ramp} us)",
    "the bus moves {bus} GB/s each way; of a kernel that reads and writes host memory the busier way counts",
    "a graph, or a RAFT selection, costs {launch} us to launch",
    "a copy from or to the host costs {copy} us beside its bytes; what is launched before it is awaited overlaps",
    "a condition, loop or call that the host waits for costs {stall} us, and a loop of unknown length is counted as one round",
    "no row has ended, and every page comes from the host (no hits)",
)
_TPU_REASONS = (
    "an operation takes the larger of {kernel} us and its bytes at {device} TB/s",
    "a round trip of a copy from host memory takes {copy} us; copies under way together share one, and {bus} GB/s",
    "no row has ended, and every page comes from the host (no hits)",
)


def reasons(target: Target, *, concurrent: bool) -> list[str]:
    """Returns the assumptions of the estimate, one sentence each."""
    rates = RATES[target.name]
    scale = dict(device=1e-6, bus=1e-3)
    shown = {}
    for name in Rates.__dataclass_fields__:
        values = (f"{getattr(x, name) * scale.get(name, 1):.3g}" for x in rates)
        shown[name] = " / ".join(dict.fromkeys(values))
    order = "follow their data, but take no less than all bytes of the graph" if concurrent else "run one after another"
    graph_order = [f"kernels of a graph {order}"] if target.platform == "gpu" else []
    return [x.format(**shown) for x in (_GPU_REASONS if target.platform == "gpu" else _TPU_REASONS)] + graph_order


@dataclass
class _Clock:
    """Simulated time within a step, in microseconds from its start.

    For example, with a kernel of 2 us, a copy of 12 us and a bus of 1 byte per us: a `start` of 30 bytes at 0 occupies the bus
    until 30 and arrives at 42; two kernels end at 4; the `wait` sets `now` to 42.

    Attributes:
        now: the present.
        bus: when the bus is free.
        arrive: when each started copy arrives, by `Work.pair`.
        done: when each work of a concurrent graph is done, by name.
    """

    rates: Rates
    concurrent: bool
    now: float = 0.0
    bus: float = 0.0
    arrive: dict[str, float] = field(default_factory=dict)
    done: dict[str, float] = field(default_factory=dict)

    def run(self, works: tuple[Work, ...] | list[Work], *, graph: bool = False) -> None:
        for work in works:
            self._one(work, graph=graph)

    def _one(self, work: Work, *, graph: bool) -> None:
        rates = self.rates
        if work.kind in ("kernel", "select", "copy"):
            self.now += rates.launch if work.kind == "select" and not graph else 0
            self.now = self._kernel(work, self.now)
        elif work.kind == "prefetch":
            self.now += work.traffic.device / rates.device
        elif work.kind == "start":
            self.bus = max(self.bus, self.now) + work.traffic.bus / rates.bus
            self.arrive[work.pair] = self.bus + rates.copy
        elif work.kind == "wait":
            self.now = max(self.now, self.arrive.pop(work.pair, 0.0))
        elif work.kind == "graph":
            self.now += rates.launch
            self._graph(work)
        elif work.kind == "call":
            self.now += rates.stall
        elif work.kind == "branch":
            self.now += 0 if work.captured else rates.stall
            self.run(work.inner, graph=graph)
        elif work.kind == "loop":
            blocking = not work.captured and work.times is None
            for _ in range(1 if work.times is None else work.times):
                self.now += rates.stall if blocking else 0
                self.run(work.inner, graph=graph)

    def _kernel(self, work: Work, start: float) -> float:
        """Returns the end of a kernel that may begin at `start`; one that reads or writes host memory waits for the bus."""
        traffic, rates = work.traffic, self.rates
        duration = max(rates.kernel, traffic.device / rates.device + rates.ramp)
        if not traffic.bus:
            return start + duration
        start = max(start, self.bus)
        self.bus = start + max(duration, traffic.bus / rates.bus)
        return self.bus

    def _graph(self, graph: Work) -> None:
        if not self.concurrent:
            return self.run(graph.inner, graph=True)
        began = free = self.now
        self.done.clear()
        for work in graph.inner:
            if work.inner:  # a branch or loop: nothing else runs beside it, and its inner order is unknown
                self.now = max(self.done.values(), default=free)
                self._one(work, graph=True)
                free = self.now
            else:
                start = max((self.done[x] for x in work.after if x in self.done), default=free)
                self.done[work.name] = self._kernel(work, max(start, free))
        memory_time = sum(x.traffic.device for x in graph.inner) / self.rates.device
        self.now = max(free, began + memory_time, *self.done.values())


def milliseconds(some: list[Work], rates: Rates, *, concurrent: bool) -> float:
    """Returns a step's milliseconds; `concurrent`: whether a graph's kernels wait only for their operands."""
    clock = _Clock(rates, concurrent)
    clock.run(some)
    return max(clock.now, *clock.arrive.values(), 0.0) / 1000


def floor(target: Target, step: Step) -> dict[str, float]:
    """Returns the least milliseconds of a step: its reads of device memory (`device_ms`), its pages over the bus (`bus_ms`).

    A step reads the weights, the layers that keep all their tokens on the device, and the digests that an index scores. No two
    query heads are assumed to choose the same page. `ms` is the larger of the two.
    """
    plan, (weights, state, _) = step.plan, step.arguments
    # Of an embedding table that is not also the output matrix, a step reads one row.
    skipped = "embed_tokens" if any("lm_head" in path for path in step.leaves) else None
    read = (x for path, x in zip(step.leaves, weights, strict=True) if (not skipped or skipped not in path) and not on_host(x))
    device_bytes = sum(map(nbytes, read))
    bus_bytes = 0
    for policy, layer in zip(plan.policies, state.cache.layers, strict=True):
        if not isinstance(policy, Retrieval):
            device_bytes += nbytes(layer)
            continue
        device_bytes += _read_bytes(policy, layer, plan)
        n = jax.eval_shape(policy.index.counts, layer.index).shape[-1]
        heads = math.prod(layer.ids.shape) // max(1, policy.num_fetched(n))
        bus_bytes += heads * fetched_per_step(policy, n, plan) * fetched_bytes(plan)
    best = RATES[target.name][0]
    times = dict(device_ms=device_bytes / (SHARE * target.bandwidth) * 1e3, bus_ms=bus_bytes / best.bus / 1e3)
    return {name: round(value, 2) for name, value in times.items()} | dict(ms=round(max(times.values()), 2))


def _read_bytes(policy: Retrieval, layer: PagedState, plan: Plan) -> int:
    """Returns the bytes of an index that a step reads: for a digest tree the highest level, and opened nodes of the others."""
    if not isinstance(policy, Clustered):
        return nbytes(layer.index)
    *lower, highest = layer.index.levels
    pages = layer.index.levels[0].count.shape[-1]
    ranked = policy.reads.num_selected(pages, pool_shapes(*plan.pool_sizes(1)))
    opened = tree.num_opened(ranked, least=policy.opened) * tree.FAN_OUT
    return nbytes(highest) + sum(nbytes(x) * min(opened, x.count.shape[-1]) // x.count.shape[-1] for x in lower)
