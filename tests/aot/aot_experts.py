"""Compiles decode steps with experts for an accelerator not in this machine: ``python -m tests.aot.aot_experts h100 8``.

Prints a JSON line for each kind of weights, which `test_aot` checks. Arguments: target, batch size, model type (default
`qwen3_moe`), and how many experts of each layer are on the device, the rest in host memory (default: all on the device).
Needs the compilers: ``pip install -e '.[aot]'``.
"""

from __future__ import annotations

import json
import sys

from flax import nnx

from bench.program import hlo
from bench.program.compile import compile_for, decode_step, hosted_shapes, on_host, without_devices
from bench.program.targets import TARGETS, Target
from bench.steps.sizes import nbytes
from icejax.cache.registry import Full
from icejax.checkpoint.load import of_experts
from icejax.models.decoder import CausalLM
from icejax.models.registry import family
from icejax.runtime import compiler_options
from tests.aot.aot_quantized import coded

SIZES = dict(
    vocab_size=256, hidden_size=512, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
    head_dim=64, max_position_embeddings=2048,
)  # fmt: skip
RAW = {
    "qwen3_moe": dict(num_experts=128, num_experts_per_tok=4, moe_intermediate_size=256, norm_topk_prob=True),
    "gpt_oss": dict(num_local_experts=128, num_experts_per_tok=4),
    "gemma4_text": dict(
        enable_moe_block=True, num_experts=128, top_k_experts=4, moe_intermediate_size=256, hidden_size_per_layer_input=0,
        global_head_dim=128,
    ),
}  # fmt: skip
# Operations that make no new array in device memory.
NO_NEW_ARRAY = ("parameter", "bitcast", "get-tuple-element", "tuple", "while", "conditional", "copy-done")
# Expert weights: code dtype, columns of a group (None: all), dtype of zero points (None: there are none).
KINDS = {
    "qwen3_moe": [
        ("int8", None, None), ("float8_e4m3fn", None, None), ("float8_e4m3fn", 128, None), ("int4", 128, None),
        ("int4", 128, "int8"), ("float4_e2m1fn", 32, None),
    ],
    "gpt_oss": [("float4_e2m1fn", 32, None)],
    "gemma4_text": [],
}  # fmt: skip


def main(name: str, batch: str, model_type: str = "qwen3_moe", resident: str = "") -> None:
    without_devices()
    raw = SIZES | RAW[model_type] | {"model_type": model_type}
    target, config = TARGETS[name], family(raw).read_config(raw)
    for kind in (None, *KINDS[model_type]):
        model = nnx.eval_shape(lambda: CausalLM(config, dtype="bfloat16"))
        if kind is not None:
            coded(model, *kind, inside=".experts.")
        if resident:
            put_on_host(model, int(resident))
        print(json.dumps(dict(kind=kind) | report(model, target, int(batch))), flush=True)


def put_on_host(model: CausalLM, resident: int) -> None:
    """Puts the experts of an abstract model into host memory, and `resident` experts of each layer on the device."""
    state = nnx.state(model)
    for path, weight in nnx.to_flat_state(state):
        if of_experts(".".join(map(str, path))):
            weight.set_value(hosted_shapes(weight.get_value(), resident))
    nnx.update(model, state)


def report(model: CausalLM, target: Target, batch: int) -> dict:
    """Returns the elements of the largest array that a step makes, and the sizes and bytes to compare it with."""
    config = model.config
    step = decode_step(model, Full(), target, batch=batch, context=512, new_tokens=64, backend=None)
    compiled = compile_for(target, step.program, step.arguments, compiler_options.OPTIONS.get(target.platform, {}))
    module = hlo.parse(compiled.hlo)
    # Arrays inside a fusion are never stored: only its results are.
    fused = {x.calls for x in module.all() if x.opcode == "fusion"}
    instructions = [x for name, lines in module.computations.items() if name not in fused for x in lines.values()]
    sizes = [array.elements for x in instructions if x.opcode not in NO_NEW_ARRAY for array in x.arrays]
    tables = {x.shape: x for x in step.arguments[0] if on_host(x)}.values()
    return dict(
        matrix_elements=config.hidden_size * config.experts.size,
        experts=config.experts.count,
        chosen=config.experts.chosen,
        largest=max(sizes),
        argument_bytes=compiled.memory.argument_size_in_bytes,
        temp_bytes=compiled.memory.temp_size_in_bytes,
        host_temp_bytes=compiled.memory.host_temp_size_in_bytes,
        table_bytes=sum(map(nbytes, tables)),
        table_copies=[y for x in tables for y in hlo.pool_copies(module, x.shape, x.dtype.itemsize)],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
