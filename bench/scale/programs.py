"""Decode steps of few layers compiled for several devices, and from them the figures of a step of all layers."""

from __future__ import annotations

from typing import Any

import jax

from bench.program import hlo, thunks, work
from bench.program.compile import Step, compile_for, decode_step, shares
from bench.program.targets import Target
from bench.steps.scopes import scope_of
from bench.steps.sizes import nbytes
from icejax.cache.protocol import CachePolicy
from icejax.engine.plan import make_plan
from icejax.models.decoder import CausalLM
from icejax.runtime import compiler_options
from icejax.runtime.mesh import size

COUNTERS = "s32"  # the counters of a step are summed too; `sums` leaves them out


def figures(target: Target, step: Step, *, devices: int) -> dict[str, Any]:
    """Returns what one device has, computes and moves in a step; bytes of collectives are those of their results."""
    options = compiler_options.OPTIONS.get(target.platform, {})
    compiled = compile_for(target, step.program, step.arguments, options, devices)
    module, scopes = hlo.parse(compiled.hlo), scope_of(compiled.hlo, list(step.leaves))
    if target.platform == "gpu":
        works = work.of_gpu(module, thunks.parse(compiled.thunks, compiled.thunk_names), scopes)
    else:
        works = work.of_tpu(module, scopes)
    crossing = hlo.collectives(module)
    pages = jax.tree.leaves(shares(step.arguments[-1]))
    return sizes(step) | dict(
        temp_bytes=compiled.memory.temp_size_in_bytes,
        flops=compiled.flops,
        device_bytes=sum(times * x.traffic.device for x, times in work.flat(works)),
        host_bytes=sum(times * x.traffic.bus for x, times in work.flat(works)),
        collective_bytes=sum(array.nbytes for _, x in crossing for array in x.arrays),
        sums=sum(opcode == "all-reduce" and x.arrays[0].dtype != COUNTERS for opcode, x in crossing),
        other_collectives=sum(opcode != "all-reduce" for opcode, _ in crossing),
        pool_copies=sum(len(hlo.pool_copies(module, x.shape, x.dtype.itemsize)) for x in pages),
    )


def sizes(step: Step) -> dict[str, int]:
    """Returns the bytes of the arrays that one device has in a step, from their shapes alone."""
    weights, state, pool = (nbytes(shares(arrays)) for arrays in step.arguments)
    return dict(weight_bytes=weights, state_bytes=state, pool_bytes=pool)


class Counting:
    """Figures of steps of one model on one target, from programs of one or two layers that are compiled once."""

    def __init__(self, target: Target, model: CausalLM, *, batch: int, new_tokens: int) -> None:
        self._target, self._model, self._sizes = target, model, dict(batch=batch, new_tokens=new_tokens)
        self._compiled: dict[Any, dict[str, Any]] = {}

    def counted(self, policy: CachePolicy, context: int) -> dict[str, Any]:
        """Returns the figures of a step of all layers.

        Layers are of one kind if their shapes and their cache policies are equal. For each kind a program of one layer is
        compiled, and one of two: what the second layer adds counts for all layers of the kind. What a step has beside its
        layers counts once, and temporary memory is the largest of the programs'. If no kind has two layers, all are compiled.
        """
        kinds = self._kinds(policy, context)
        places = {kind: [i for i, other in enumerate(kinds) if other == kind] for kind in dict.fromkeys(kinds)}
        if len(places) == len(kinds):
            return self.compiled(policy, context)
        ones = {kind: self.compiled(policy, context, of_kind[:1]) for kind, of_kind in places.items()}
        twos = {kind: self.compiled(policy, context, x[:2]) for kind, x in places.items() if len(x) > 1}
        repeated = next(iter(twos))
        beside = {name: 2 * ones[repeated][name] - twos[repeated][name] for name in ones[repeated]}
        total = dict(beside)
        for kind, of_kind in places.items():
            without, program = (ones[kind], twos[kind]) if kind in twos else (beside, ones[kind])
            total = {name: total[name] + len(of_kind) * (program[name] - without[name]) for name in total}
        return total | dict(temp_bytes=max(x["temp_bytes"] for x in (*ones.values(), *twos.values())))

    def shapes(self, policy: CachePolicy, context: int) -> dict[str, int]:
        """Returns the bytes of a step of all layers; nothing is compiled."""
        return sizes(self._step(policy, context, None))

    def compiled(self, policy: CachePolicy, context: int, layers: list[int] | None = None) -> dict[str, Any]:
        """Returns the figures of a step of some layers, by default of all."""
        step = self._step(policy, context, layers)
        all_layers = self._model.config.layers
        key = step.plan, tuple(all_layers[i] for i in (range(len(all_layers)) if layers is None else layers))
        if key not in self._compiled:
            self._compiled[key] = figures(self._target, step, devices=size(self._model.mesh))
        return self._compiled[key]

    def _step(self, policy: CachePolicy, context: int, layers: list[int] | None) -> Step:
        options = self._sizes | dict(context=context, backend=None, layers=layers)
        return decode_step(self._model, policy, self._target, **options)

    def _kinds(self, policy: CachePolicy, context: int) -> list[tuple]:
        sizes = dict(batch_size=self._sizes["batch"], prompt_tokens=context, new_tokens=self._sizes["new_tokens"])
        plan = make_plan(self._model, policy, platform=self._target.platform, **sizes)
        return list(zip(self._model.config.layers, plan.policies, plan.heads, strict=True))
