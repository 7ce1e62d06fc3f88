"""XLA options of the decode step by platform, each with its reason; the engine compiles the step with them."""

from __future__ import annotations

import jax

OPTIONS: dict[str, dict[str, str | bool]] = {
    "gpu": {
        # The step is one CUDA graph. With edges that follow the data, pages are fetched while kernels that need no page run;
        # by default the graph is one chain of kernels.
        "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    },
    "tpu": {
        # Keys and values of few heads fit the memory near the cores. XLA:TPU would copy them there to append a token, and back:
        # twice the bytes that attention reads, a ratio of 0.5. Weights, which are copied one way, have a ratio of 1.
        "xla_tpu_msa_inefficient_use_to_copy_ratio": "0.75",
    },
}
if jax.__version_info__ >= (0, 11, 1):
    # XLA:TPU gathers by SparseCore, up to 57% slower for a decode step's gathers (sglang-jax, issue 1613).
    OPTIONS["tpu"]["xla_tpu_offload_gather_to_sparsecore"] = "false"
