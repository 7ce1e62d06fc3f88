"""Compiler options of the decode step, by platform, each with its reason."""

from __future__ import annotations

import jax

OPTIONS: dict[str, dict[str, str | bool]] = {
    "gpu": {
        # The step is one CUDA graph. Its edges follow the data, so that pages are on their way while what needs no page runs;
        # by default all kernels stand in one chain.
        "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    },
    # From JAX 0.11.1 on XLA:TPU gathers by SparseCore, up to 57% slower for gathers of a decode step (sglang-jax, issue 1613).
    "tpu": {"xla_tpu_offload_gather_to_sparsecore": "false"} if jax.__version_info__ >= (0, 11, 1) else {},
}
