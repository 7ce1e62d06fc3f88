"""Compiles a program for a device that is not there: ``python -m tests.aot cuda step gather 1 int8`` prints what was made.

Its arguments: the platform, the program (`step`, `flush`, `flushed`, `compact`; of a layer `prefill`, `extend` and `write`;
`write-pages` and `read-pages`, 64 of all layers), and as far as they are wanted the fetch backend, the batch size, and
`int8` for pages of int8.

Needs the compilers: ``pip install -e '.[aot]'``. The pool is an array of the CPU's pinned memory, because a device of a topology
has no memory kinds in jax 0.10.2.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import sys

# There is no driver to ask, and no metadata server.
os.environ |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax._src.lib import xla_client
from jax.experimental import topologies

import icejax
from bench import shapes
from icejax import inference
from icejax.cache import host
from icejax.cache.encoding import bits_dtype
from icejax.cache.policy import KVCache, Lengths
from icejax.models import CausalLM, family
from icejax.ops import topk
from icejax.plan import make_plan
from icejax.sampling import Sampling

# What XLA reads of an H100.
H100 = """
device_description_str: "H100" platform_name: "CUDA" runtime_version { major: 12 minor: 8 } dnn_version_info { major: 9 minor: 7 }
gpu_device_info {
  cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}
"""
CONTEXT = 32768


def programs(batch: int, page_dtype: str | None, backend: str, platform: str):
    """Returns a plan of two bf16 layers of 8 KV heads of 128, and what each of its programs is traced with, by name."""
    raw = shapes.raw_config("attention", layers=2)
    model = nnx.eval_shape(lambda: CausalLM(family(raw).read_config(raw), dtype="bfloat16"))
    graph, weights = nnx.split(model)
    leaves, tree = jax.tree.flatten(weights)
    policy = icejax.Clustered(budget=256, page_dtype=page_dtype)
    plan = make_plan(model, policy, Sampling(), batch_size=batch, prompt_tokens=CONTEXT, new_tokens=64)
    plan = dataclasses.replace(plan, fetch_backend=backend)

    def empty() -> inference.DecodeState:
        none = jnp.zeros(batch, jnp.int32)
        layers = tuple(p.init(plan.spec) for p in plan.policies)
        return inference.DecodeState(
            KVCache(layers, Lengths(none, jnp.int32(0), jnp.int32(0))),
            none,
            none > 0,
            inference.row_keys([(0, i) for i in range(batch)]),
            None,
        )

    state = jax.eval_shape(empty)
    step, flush, flushed, compact = inference._programs(graph, tree, plan)
    pinned = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0], memory_kind="pinned_host")
    pool = jax.device_put(np.zeros(plan.pool_shape, bits_dtype(plan.pool_dtype)), pinned)
    page = (*plan.pool_shape[2:5], plan.page_size, plan.pool_shape[-1])
    layer, flat = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((CONTEXT // 16, *page), (64, 2, *page)))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    write = jax.jit(functools.partial(host._write_layer, singly=platform == "tpu"), donate_argnums=0)
    read = jax.jit(functools.partial(host.read_pages, count=64, dtype="bfloat16"))
    policy, view = plan.policies[0], host.PoolLayer(pool, None, np.int32(0), backend, "bfloat16")
    prefill = jax.jit(functools.partial(inference._prefill_layer, policy=policy, spec=plan.spec, window=None))
    extend = jax.jit(functools.partial(inference._extend_layer, policy=policy))
    x, more = (jax.ShapeDtypeStruct((batch, tokens, model.config.hidden_size), "bfloat16") for tokens in (CONTEXT, 1024))
    first, lengths = model.model.layers[0], state.cache.lengths
    return (plan, [x.levels for x in state.cache.layers]), {
        "step": (step, ([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves], state, pool)),
        "prefill": (prefill, (first, x, lengths, None)),
        "extend": (extend, (first, more, lengths, lengths.prompt, state.cache.layers[0], view, None)),
        "write": (write, (pool, layer, number, number)),
        "flush": (flush, (state.cache,)),
        "flushed": (flushed, (state.cache, jax.eval_shape(flush, state.cache)[1])),
        "compact": (compact, (state.cache, flat)),
        "write-pages": (host.write_pages, (pool, flat, number)),
        "read-pages": (read, (pool, number)),
    }


def compile_for(platform: str, program, arguments):
    """Returns the compiled program."""
    if platform == "cuda":
        topology = topologies.get_topology_desc("h100", "cuda", topology="1x1x1", target_config=H100)
    else:
        topology = topologies.get_topology_desc("v5e:2x2", "tpu")
    device = topology.devices[0]
    lowered = program.trace(*arguments).lower(lowering_platforms=(platform,))
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.asarray([[device.id]]))
    if platform == "cuda":  # autotuning would need the device
        options.env_option_overrides = [("xla_gpu_autotune_level", "0"), *topk.GPU_OPTIONS.items()]
    return device.client.compile(lowered.compiler_ir("stablehlo"), xla_client.DeviceList((device,)), options)


def main(platform: str, name: str, backend: str = "gather", batch: str = "1", page_dtype: str | None = None) -> None:
    (plan, levels), made = programs(int(batch), page_dtype, backend, platform)
    program = compile_for(platform, *made[name])
    hlo, memory = program.hlo_modules()[0].to_string(), program.get_compiled_memory_stats()
    elements, bits = math.prod(plan.pool_shape), bits_dtype(plan.pool_dtype)
    product = rf"^\s*(?:ROOT )?%\S+ = (?:u|s|bf){8 * bits.itemsize}\[([\d,]+)\]"
    shapes_made = [(line, shape) for line in hlo.splitlines() for shape in re.findall(product, line)]
    copies = [
        line.strip()[:100]
        for line, shape in shapes_made
        if math.prod(map(int, shape.split(","))) == elements
        and not re.search(r"\} (parameter|bitcast|get-tuple-element)\(", line)
    ]
    sorted_sizes = [
        max(map(int, shape.split(",")))
        for shape in re.findall(r"f32\[([\d,]+)\]\S* sort\(|f32\[([\d,]+)\]\S*, s32\S+ sort\(", hlo)
        for shape in shape
        if shape
    ]
    print(
        json.dumps(
            dict(
                pool_bytes=elements * bits.itemsize,
                host_temp_bytes=memory.host_temp_size_in_bytes,
                temp_bytes=memory.temp_size_in_bytes,
                levels_bytes=sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(levels)),
                alias_bytes=memory.host_alias_size_in_bytes + memory.alias_size_in_bytes,
                pool_copies=copies,
                sorted_sizes=sorted_sizes,
            )
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
