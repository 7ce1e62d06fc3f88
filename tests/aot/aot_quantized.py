"""Compiles decode steps of quantised models for an accelerator not in this machine: ``python -m tests.aot.aot_quantized h100``.

Prints a JSON line for each format and batch size: the instructions that make an array as large as one of the model's matrices.
Needs the compilers: ``pip install -e '.[aot]'``.
"""

import json
import sys

import jax
from flax import nnx

import icejax
from bench.program import hlo
from bench.program.compile import abstract_model, compile_for, decode_step, without_devices
from bench.program.targets import TARGETS
from icejax.models.decoder import CausalLM
from icejax.ops.quantized.products import Grouped
from icejax.runtime import compiler_options

# Code dtype, columns of a group (None: all), dtype of zero points (None: there are none).
KINDS = [("int8", None, None), ("float8_e4m3fn", None, None), ("float8_e4m3fn", 128, None), ("int4", 128, None)]
KINDS += [("int4", 128, "int8")]
KINDS += [("int4", 32, "float32"), ("int8", 32, "float32"), ("int4", 32, None), ("int8", 32, None), ("int8", 16, None)]  # GGUF

# Operations that make no array. An asynchronous copy, as into a TPU's on-chip memory, makes one when it is done.
GIVEN = ("parameter", "bitcast", "get-tuple-element", "tuple", "opt-barrier", "copy-start", "slice-start", "async-start")


def coded(model: CausalLM, kind: str, group: int | None, zero: str | None, *, inside: str = "proj") -> set[int]:
    """Replaces matrices of an abstract model whose keys contain `inside` by codes; returns their element counts."""
    state, sizes = nnx.state(model), set()
    for path, weight in nnx.to_flat_state(state):
        if "proj" in path[-2] and path[-1] == "weight" and inside in ".".join(map(str, path)):
            *leading, rows, columns = weight.get_value().shape
            grid = (*leading, columns // (group or columns), rows)
            codes_and_scale = [jax.ShapeDtypeStruct((*grid, columns // grid[-2]), kind), jax.ShapeDtypeStruct(grid, "float32")]
            weight.set_value(Grouped(*codes_and_scale, jax.ShapeDtypeStruct(grid, zero) if zero else None))
            sizes.add(rows * columns)
    nnx.update(model, state)
    return sizes


def main(name: str) -> None:
    without_devices()
    target = TARGETS[name]
    for kind, group, zero in KINDS:
        model = abstract_model("llama-3.1-8b", dtype="bfloat16", layers=1)
        matrices = coded(model, kind, group, zero)
        for batch in (1, 8):
            sizes = dict(batch=batch, context=1024, new_tokens=64, backend=None)
            step = decode_step(model, icejax.Full(), target, **sizes)
            compiled = compile_for(target, step.program, step.arguments, compiler_options.OPTIONS.get(target.platform, {}))
            module = hlo.parse(compiled.hlo)
            outside = (x for x in module.computations[module.entry].values() if x.opcode not in GIVEN)
            large = ((x.name, array) for x in outside for array in x.arrays if array.elements in matrices and array.space == 0)
            # Sums per group [G, B, O] of a large matrix may have as many elements as a small matrix.
            copies = sorted({name for name, array in large if len(array.shape) < 3 or array.shape[1] != batch})
            print(json.dumps(dict(kind=kind, group=group, zero=zero, batch=batch, copies=copies)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
