"""A decode step on 1, 2, 4 and 8 devices, without having any: ``python -m bench.scale --out bench/results``.

For every combination of `--shape`, `--target`, `--devices`, `--weights`, `--context` and `--cache` (comma-separated lists) the
command compiles steps of one and two layers for the devices, and counts from them what one device has, computes and moves in a
step of all layers, and the least time that each link needs. `--whole` compiles all layers instead, to check the counting;
`--sizes` compiles nothing and gives the bytes of weights, cache and pages alone. The output is a JSON line per row. With
`--out`, rows go to scale.jsonl, in place of earlier rows with the same names, and the page scale.md is made of all. The
compilers come with ``pip install -e '.[aot]'``, for jax 0.10.2.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from bench.flags import listed, make_folder, numbers, print_rows
from bench.program import compile, targets
from bench.program.__main__ import PLAIN, versions
from bench.scale import page
from bench.scale.links import MACHINES, bounds, machine
from bench.scale.programs import Counting
from bench.steps import shapes
from icejax.cache.options import make_policy
from icejax.checkpoint.quantized.rounding import METHODS
from icejax.checks.errors import InputError
from icejax.runtime.mesh import Mesh

MOST_DEVICES = 8
OPTIONS = {("coded", "tpu"): dict(singly=False)}  # a TPU fetches no single tokens


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row per combination; one that cannot be compiled has the reason in its row."""
    machines = {name: machine(name) for name in arguments.target.split(",")}
    counts, contexts = numbers("--devices", arguments.devices, most=MOST_DEVICES), numbers("--context", arguments.context)
    check_counts(counts)
    weights, caches = listed("--weights", arguments.weights, (PLAIN, *METHODS)), arguments.cache.split(",")
    names = listed("--shape", arguments.shape, tuple(shapes.SHAPES))
    if arguments.sizes and arguments.whole:
        raise InputError("--sizes compiles nothing: leave --whole out")
    if not arguments.sizes:
        for name in machines:
            compile.check_compiler(targets.target(name))
    for shape, (name, links), count, weight in itertools.product(names, machines.items(), counts, weights):
        target = targets.target(name)
        policies = {x: make_policy(x, OPTIONS.get((x, target.platform), {})) for x in caches}
        labels = dict(shape=shape, target=name, devices=count, weights="bfloat16" if weight == PLAIN else weight)
        mesh = None if count == 1 else Mesh(count)
        try:
            options = dict(dtype="bfloat16", layers=arguments.layers, rounding=METHODS.get(weight), mesh=mesh)
            model = compile.abstract_model(shape, **options)
        except InputError as error:
            yield labels | dict(context=None, cache=None, left_out=str(error))
            continue
        counting = Counting(target, model, batch=1, new_tokens=64)
        count_step = counting.shapes if arguments.sizes else counting.compiled if arguments.whole else counting.counted
        for context, (cache, policy) in itertools.product(contexts, policies.items()):
            labels |= dict(layers=model.config.num_hidden_layers, context=context, cache=cache, whole=arguments.whole)
            try:
                counted = count_step(policy, context)
            except (InputError, jax.errors.JaxRuntimeError) as error:
                yield labels | dict(left_out=(str(error).splitlines() or [""])[0][:300])
                continue
            need = sum(counted.get(name, 0) for name in ("weight_bytes", "state_bytes", "temp_bytes"))
            row = labels | counted | dict(fits=need <= target.memory, memory=target.memory)
            yield row if arguments.sizes else row | dict(ms=bounds(links, count, counted)) | versions(target)


def check_counts(counts: list[int]) -> None:
    """Raises InputError for a number of devices that no target has."""
    if wrong := [count for count in counts if count not in (1, 2, 4, 8)]:
        raise InputError(f"--devices must be of 1, 2, 4, 8, got {wrong[0]}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3.1-70b", help=f"of {', '.join(shapes.SHAPES)} (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="of the shape (default: its own)")
    parser.add_argument("--target", default=",".join(MACHINES), help="default: %(default)s")
    parser.add_argument("--devices", default="1,2,4,8", help="default: %(default)s")
    parser.add_argument("--weights", default=PLAIN, help=f"of {', '.join((PLAIN, *METHODS))} (default: %(default)s)")
    parser.add_argument("--context", default="131072,1048576", help="tokens (default: %(default)s)")
    parser.add_argument("--cache", default="full,clustered,coded", help="default: %(default)s")
    parser.add_argument("--whole", action="store_true", help="compile all layers")
    parser.add_argument("--sizes", action="store_true", help="compile nothing: bytes of weights, cache and pages alone")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where scale.jsonl and scale.md are, and go")
    arguments = parser.parse_args(argv)
    compile.without_devices(MOST_DEVICES)

    def kept() -> Iterator[dict[str, Any]]:
        if arguments.out is not None:
            make_folder(arguments.out)
        for row in rows(arguments):
            if arguments.out is not None:
                page.add(arguments.out, row)
            yield row

    print_rows(parser, kept())
    return 0


if __name__ == "__main__":
    sys.exit(main())
