"""Compiles decode steps with latent attention for an accelerator not in this machine: ``python -m tests.aot.aot_latent h100``.

Prints a JSON line for each cache and batch size: the instructions that copy the pool, or make an array as large as `kv_b_proj`,
half of it (its keys or values), or one digest vector of every page. Needs the compilers: ``pip install -e '.[aot]'``.
"""

import json
import math
import sys

from bench.program import hlo
from bench.program.compile import abstract_model, compile_for, decode_step, without_devices
from bench.program.targets import TARGETS
from icejax.cache.registry import Clustered, Full
from icejax.runtime import compiler_options
from tests.aot.aot_quantized import GIVEN


def main(name: str) -> None:
    without_devices()
    target, model = TARGETS[name], abstract_model("deepseek-v2-lite", dtype="bfloat16", layers=1)
    rows, rank = model.model.layers[0].self_attn.kv_b_proj.weight.shape
    for policy in (Full(), Clustered(dense_layers=0)):
        for batch in (1, 8):
            step = decode_step(model, policy, target, batch=batch, context=8192, new_tokens=64, backend=None)
            module = hlo.parse(
                compile_for(target, step.program, step.arguments, compiler_options.OPTIONS.get(target.platform, {})).hlo
            )
            pool, layer_state = step.arguments[2], step.arguments[1].cache.layers[0]
            sizes = {rows * rank, rows * rank // 2}
            if pool is not None:
                sizes.add(math.prod(layer_state.index.levels[0].mean.data.shape))
            outside = (x for x in module.computations[module.entry].values() if x.opcode not in GIVEN)
            copies = [x.name for x in outside if sizes & {array.elements for array in x.arrays}]
            copies += [] if pool is None else hlo.pool_copies(module, pool.shape, pool.dtype.itemsize)
            print(json.dumps(dict(policy=type(policy).__name__, batch=batch, copies=copies)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
