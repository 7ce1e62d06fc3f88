"""The devices that `bench.program` can compile for without having them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.experimental import topologies

from icejax.checks.errors import InputError, suggestion

# XLA's description of a GPU. Without the versions XLA assumes an old driver, and captures less in graphs.
_GPU = """
device_description_str: "{name}" platform_name: "CUDA"
runtime_version {{ major: 12 minor: 9 }} dnn_version_info {{ major: 9 minor: 7 }}
gpu_device_info {{
  driver_version: "12.9.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
  cuda_compute_capability {{ major: {capability} }} core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: {clock}
  device_memory_size: {memory} memory_bandwidth: {bandwidth} l2_cache_size: {l2}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared} shared_memory_per_core: {shared_core}
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}}
"""
_HOPPER = dict(capability=9, cores=132, fpus=128, clock=1.98, l2=52428800, shared=232448, shared_core=233472)
_AMPERE = dict(capability=8, cores=108, fpus=64, clock=1.41, l2=41943040, shared=166912, shared_core=167936)

_TPUS = {1: "2x2", 2: "1x2", 4: "2x2", 8: "2x4"}  # arrangement of the devices of a host


@dataclass(frozen=True)
class Target:
    """A device.

    Attributes:
        platform: `gpu` or `tpu`, as in a plan.
        memory: bytes on the device.
        bandwidth: bytes per second of that memory, from the data sheet.
        gpu: the other fields of `_GPU`; None for a TPU.
    """

    name: str
    platform: str
    memory: int
    bandwidth: int
    gpu: dict | None = None

    @property
    def lowering(self) -> str:
        """The platform's name in JAX's lowering."""
        return "cuda" if self.platform == "gpu" else "tpu"

    def devices(self, count: int = 1) -> list[jax.Device]:
        """Returns descriptions of devices of one host to compile for; they cannot run programs."""
        if self.gpu is None:
            return topologies.get_topology_desc(f"{self.name}:{_TPUS[count]}", "tpu").devices[:count]
        config = _GPU.format(name=self.name.upper(), memory=self.memory, bandwidth=self.bandwidth, **self.gpu)
        return topologies.get_topology_desc(self.name, "cuda", topology=f"1x1x{count}", target_config=config).devices


TARGETS = {
    target.name: target
    for target in (
        Target("h100", "gpu", 84929347584, 3352320000000, _HOPPER),
        Target("h200", "gpu", 150754820096, 4800000000000, _HOPPER),
        Target("a100", "gpu", 84987740160, 2039000000000, _AMPERE),
        Target("v5e", "tpu", 16 * 2**30, 819000000000),
        Target("v6e", "tpu", 32 * 2**30, 1640000000000),
    )
}


def target(name: str) -> Target:
    """Returns the target of a name; InputError lists the names if there is none."""
    if name not in TARGETS:
        raise InputError(f"--target must be of {', '.join(TARGETS)}, got {name!r}{suggestion(name, TARGETS)}")
    return TARGETS[name]
