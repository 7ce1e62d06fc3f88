"""Compiles a decode step for a device that this machine lacks, from abstract arrays: for `bench.program` and tests.

Model, cache state and pool are shapes and dtypes, so no array is made. Needs the compilers: ``pip install -e '.[aot]'``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax._src.lib import _jax, xla_client

from bench.program.targets import Target
from bench.steps import shapes
from icejax.cache.pool import host_pool
from icejax.cache.pool.extents import extents_for
from icejax.cache.pool.page_format import pool_shapes
from icejax.cache.protocol import CachePolicy
from icejax.checkpoint.load import abstract, of_experts
from icejax.checkpoint.quantized import formats
from icejax.checkpoint.quantized.rounding import Method
from icejax.checks.errors import InputError, suggestion
from icejax.engine.batch import empty_batch
from icejax.engine.decode.state import DecodeState, decode_cuts
from icejax.engine.decode.step import step_program
from icejax.engine.plan import Plan, make_plan
from icejax.models.decoder import CausalLM
from icejax.models.parts.latent_attention import BY_HEAD
from icejax.models.registry import family
from icejax.models.sharding import check_mesh, weight_cuts
from icejax.ops.experts.offloaded_experts import OffloadedExperts, is_offloaded, packed
from icejax.ops.quantized.products import Grouped
from icejax.runtime import devices
from icejax.runtime.host_reads.backends import BACKENDS
from icejax.runtime.host_reads.choose import ORDER
from icejax.runtime.host_reads.reader import Reader
from icejax.runtime.mesh import Mesh

PLUGINS = dict(gpu="jax_cuda12_plugin", tpu="libtpu")


@dataclass(frozen=True)
class Step:
    """A decode step before compilation.

    Attributes:
        program: the jitted function.
        arguments: its arguments: weights, state and pool, all abstract.
        leaves: paths of the weights, in the order of the program's parameters.
    """

    plan: Plan
    program: Any
    arguments: tuple
    leaves: tuple[str, ...]


@dataclass(frozen=True)
class Compiled:
    """A compiled program.

    Attributes:
        hlo: text of the optimized program.
        thunks: XLA:GPU's dump of its thunks (the operations that it launches) in order; empty for a TPU.
        thunk_names: XLA:GPU's dump of each thunk's instruction; empty for a TPU.
        memory: XLA's memory statistics of the program.
        flops: floating-point operations of a device by XLA's analysis, which counts a loop as one round, and no kernel of ours.
    """

    hlo: str
    thunks: str
    thunk_names: str
    memory: Any
    flops: float


def without_devices(count: int = 1) -> None:
    """Keeps JAX from looking for devices: no driver, no metadata server, and no lock of a TPU for one process.

    Args:
        count: CPU devices that stand for those of a mesh while programs are traced.
    """
    os.environ |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    jax.config.update("jax_platforms", "cpu")
    if count > 1:
        jax.config.update("jax_num_cpu_devices", count)


def abstract_model(
    name: str,
    *,
    dtype: str,
    layers: int | None = None,
    rounding: Method | None = None,
    experts_on_host: int | None = None,
    mesh: Mesh | None = None,
) -> CausalLM:
    """Returns the abstract model of a shape; with `rounding` its matrices are codes.

    Args:
        experts_on_host: as in `load_model`; `decode_step` sets how they are read.
        mesh: the devices that share the KV heads; `without_devices` was given their number.

    Raises:
        InputError: the model cannot be cut for the mesh.
    """
    raw = shapes.raw_config(name, layers=layers)
    config = family(raw).read_config(raw)
    check_mesh(config, mesh)
    graph, leaves, tree = abstract(config, dtype, mesh)
    if rounding is not None:
        sources = formats.sources(raw, {key: leaf.shape for key, leaf in leaves.items()}, rounding=rounding)
        formats.check_groups(sources, {key: leaf.shape[-1] for key, leaf in leaves.items()})
        coded = [key for key, source in sources.items() if source.layout is not None and not key.endswith(BY_HEAD)]
        leaves |= {key: _codes(leaves[key].shape, rounding) for key in coded}
    if experts_on_host is not None:
        leaves |= {key: hosted_shapes(leaf, experts_on_host) for key, leaf in leaves.items() if of_experts(key)}
    if mesh is not None:
        leaves = {key: placed(leaf, weight_cuts(key, leaf), mesh) for key, leaf in leaves.items()}
    return nnx.merge(graph, jax.tree.unflatten(tree, leaves.values()))


def placed(arrays: Any, cuts: Any, mesh: Mesh | None, *, on_host: bool = False) -> Any:
    """Returns abstract arrays with the shardings of their cuts on a mesh; without one the arrays."""
    if mesh is None:
        return arrays
    shardings = jax.tree.map(functools.partial(mesh.sharding, on_host=on_host), jax.tree.broadcast(cuts, arrays))
    return jax.tree.map(lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=y), arrays, shardings)


def shares(arrays: Any) -> Any:
    """Returns one device's shares of abstract arrays, as shapes."""

    def share(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape if x.sharding is None else x.sharding.shard_shape(x.shape), x.dtype)

    return jax.tree.map(share, arrays)


def hosted_shapes(matrices: jax.ShapeDtypeStruct | Grouped, resident: int) -> OffloadedExperts:
    """Returns abstract matrices of experts in host memory, `resident` of them also on the device."""
    table, count = jax.eval_shape(packed, matrices), jax.tree.leaves(matrices)[0].shape[0]
    resident_matrices = jax.tree.map(lambda x: jax.ShapeDtypeStruct((resident, *x.shape[1:]), x.dtype), matrices)
    table = jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=_pinned())
    return OffloadedExperts(table, resident_matrices, jax.ShapeDtypeStruct((count,), "int32"), None, Reader(""))


def _codes(shape: tuple[int, ...], rounding: Method) -> Grouped:
    """Returns the abstract codes of a matrix, or of a matrix per expert, in their layout on a device."""
    *leading, rows, columns = shape
    group = rounding.group or columns
    grid = (*leading, columns // group, rows)
    return Grouped(jax.ShapeDtypeStruct((*grid, group), rounding.dtype), jax.ShapeDtypeStruct(grid, "float32"), None)


def abstract_state(plan: Plan) -> DecodeState:
    """Returns the abstract state of a decode step."""
    return placed(jax.eval_shape(lambda: empty_batch(plan)), decode_cuts(plan), plan.mesh)


def abstract_pool(plan: Plan) -> Any:
    """Returns the abstract pool in host memory; None for a plan without one."""
    if not plan.pooled:
        return None
    shapes = pool_shapes(*plan.pool_sizes(plan.spec.batch_size * extents_for(plan.pool.pages)))
    if plan.mesh is not None:
        return placed(shapes, host_pool.BY_HEAD, plan.mesh, on_host=True)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_pinned()), shapes)


def on_host(x: jax.ShapeDtypeStruct) -> bool:
    """Returns whether an abstract array is in host memory."""
    return x.sharding is not None and x.sharding.memory_kind == devices.PINNED


def _pinned() -> jax.sharding.NamedSharding:
    """Returns a sharding in pinned host memory; it is a named one, because a trace ignores the memory of others."""
    mesh = jax.sharding.Mesh(np.asarray([devices.device("cpu")]), ("device",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(), memory_kind=devices.PINNED)


def decode_step(
    model: CausalLM,
    policy: CachePolicy,
    target: Target,
    *,
    batch: int,
    context: int,
    new_tokens: int,
    backend: str | None,
    layers: Sequence[int] | None = None,
) -> Step:
    """Returns the decode step after a prompt of `context` tokens.

    Args:
        backend: how the pool is read, a name of `BACKENDS`; None: the platform's first choice.
        layers: the only layers of the step; None: all.

    Raises:
        InputError: there is no such backend, or the platform cannot run the policy.
    """
    if backend is not None and backend not in BACKENDS:
        raise InputError(f"--fetch-backend must be of {', '.join(BACKENDS)}, got {backend!r}{suggestion(backend, BACKENDS)}")
    plan = make_plan(model, policy, platform=target.platform, batch_size=batch, prompt_tokens=context, new_tokens=new_tokens)
    if backend is not None and plan.pooled:
        plan = dataclasses.replace(plan, fetch_backend=backend)
    if layers is not None:
        model, plan = _of_layers(model, layers), _plan_of_layers(plan, layers)
    graph, weights = nnx.split(model)
    reader = Reader(backend or ORDER[target.platform][0])
    weights = jax.tree.map(
        lambda x: dataclasses.replace(x, read=reader) if is_offloaded(x) else x, weights, is_leaf=is_offloaded
    )
    leaves, tree = jax.tree.flatten(weights)
    paths = tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(weights))
    flat = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)) for x in leaves]
    program = step_program(graph, tree, plan)
    return Step(plan, program, (flat, abstract_state(plan), abstract_pool(plan)), paths)


def _of_layers(model: CausalLM, layers: Sequence[int]) -> CausalLM:
    """Returns a model with some layers of another."""
    graph, state = nnx.split(model)
    model = nnx.merge(graph, state)
    model.model.layers = nnx.List([model.model.layers[i] for i in layers])
    return model


def _plan_of_layers(plan: Plan, layers: Sequence[int]) -> Plan:
    policies, heads = (tuple(x[i] for i in layers) for x in (plan.policies, plan.heads))
    return dataclasses.replace(plan, policies=policies, heads=heads)


def check_compiler(target: Target, backend: str = "") -> None:
    """Raises InputError if this environment cannot compile for the target."""
    if importlib.util.find_spec(PLUGINS[target.platform]) is None:
        raise InputError(f"compiling for {target.name} needs {PLUGINS[target.platform]}: pip install -e '.[aot]'")
    if backend == "triton" and jax.__version_info__ >= (0, 11):
        raise InputError(
            f"jax {jax.__version__} compiles no Triton kernel without a GPU: "
            "use jax 0.10.2 (pip install 'jax==0.10.2' -e '.[aot]') or another --fetch-backend"
        )


def compile_for(target: Target, program: Any, arguments: tuple, options: dict[str, str | bool], count: int = 1) -> Compiled:
    """Returns a program compiled for the target.

    Args:
        options: compiler options.
        count: devices of the mesh that the program's arguments are cut for.

    Raises:
        InputError: the compiler is not installed, or does not know an option.
        jax.errors.JaxRuntimeError: the program does not compile.
    """
    check_compiler(target)
    devices_ = target.devices(count)
    lowered = program.trace(*arguments).lower(lowering_platforms=(target.lowering,)).compiler_ir("stablehlo")
    compile_options = xla_client.CompileOptions()
    compile_options.num_replicas, compile_options.num_partitions = 1, count
    compile_options.device_assignment = xla_client.DeviceAssignment.create(np.asarray([[device.id for device in devices_]]))
    if count > 1:
        compile_options.executable_build_options.use_spmd_partitioning = True
        compile_options.executable_build_options.use_shardy_partitioner = True
    if target.platform == "gpu":  # autotuning needs the device
        options = {"xla_gpu_autotune_level": "0"} | options
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder} if target.platform == "gpu" else {}
        compile_options.env_option_overrides = list((options | dump).items())
        try:
            executable = devices_[0].client.compile(lowered, xla_client.DeviceList(tuple(devices_)), compile_options)
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" in str(error) or "While setting option" in str(error):
                raise InputError(f"--flag: {str(error).splitlines()[0]}") from None
            raise
        names = ("thunk_sequence_after_thunk_passes", "thunk_metadata")
        texts = ["".join(file.read_text() for file in Path(folder).glob(f"*.{name}.txt")) for name in names]
    module, analyst = executable.hlo_modules()[0], devices.device("cpu").client
    flops = _jax.hlo_module_cost_analysis(analyst, module)["flops"]
    return Compiled(module.to_string(), *texts, executable.get_compiled_memory_stats(), flops)
