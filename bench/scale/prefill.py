"""A layer's prefill on several devices, without having any: ``python -m bench.scale.prefill --devices 1,8``.

Compiles the program that takes one layer over a whole prompt, and prints a JSON line of what one device has of it: bytes of the
prompt's hidden states, of temporary arrays, and of all that is there at once, with the layer's weights and its keys and values.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import jax

from bench.flags import listed, numbers, print_rows
from bench.program import compile, hlo, targets
from bench.scale.__main__ import MOST_DEVICES, check_counts
from bench.steps import shapes
from bench.steps.sizes import nbytes
from icejax.cache.options import make_policy
from icejax.engine.plan import make_plan
from icejax.engine.prefill import _prefill_layer
from icejax.runtime.mesh import WHOLE, Mesh, stream_cut, stream_parts


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row per shape, number of devices and prompt length."""
    target, policy = targets.target(arguments.target), make_policy(arguments.cache, {})
    counts, contexts = numbers("--devices", arguments.devices, most=MOST_DEVICES), numbers("--context", arguments.context)
    check_counts(counts)
    names = listed("--shape", arguments.shape, tuple(shapes.SHAPES))
    compile.check_compiler(target)
    for name, count, context in itertools.product(names, counts, contexts):
        mesh = None if count == 1 else Mesh(count)
        model = compile.abstract_model(name, dtype="bfloat16", layers=2, mesh=mesh)
        sizes = dict(batch_size=1, prompt_tokens=context, new_tokens=64)
        plan = make_plan(model, policy, platform=target.platform, **sizes)
        parts, tokens = stream_parts(mesh), plan.spec.prompt_capacity
        x = jax.ShapeDtypeStruct((1, tokens // parts, parts * model.config.hidden_size), "bfloat16")
        x = compile.placed(x, stream_cut(mesh), mesh)
        lengths = compile.placed(jax.ShapeDtypeStruct((1,), "int32"), WHOLE, mesh)
        run = functools.partial(_prefill_layer.__wrapped__, policy=plan.policies[0], spec=plan.spec)
        program = jax.jit(run, donate_argnums=1)
        compiled = compile.compile_for(target, program, (model.model.layers[0], x, lengths, None), {}, count)
        memory, crossing = compiled.memory, hlo.collectives(hlo.parse(compiled.hlo))
        yield dict(
            shape=name,
            target=arguments.target,
            devices=count,
            context=context,
            cache=arguments.cache,
            hidden_bytes=nbytes(compile.shares(x)),
            temp_bytes=memory.temp_size_in_bytes,
            peak_bytes=memory.peak_memory_in_bytes,
            collectives=sorted({opcode for opcode, _ in crossing}),
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scale.prefill", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3.1-70b", help=f"of {', '.join(shapes.SHAPES)} (default: %(default)s)")
    parser.add_argument("--target", default="h100", help="default: %(default)s")
    parser.add_argument("--devices", default="8", help="default: %(default)s")
    parser.add_argument("--context", default="131072,1048576", help="tokens (default: %(default)s)")
    parser.add_argument("--cache", default="full", help="default: %(default)s")
    arguments = parser.parse_args(argv)
    compile.without_devices(MOST_DEVICES)
    print_rows(parser, rows(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
