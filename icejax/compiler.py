"""Compiler options of the decode step, by platform, each with its reason."""

from __future__ import annotations

OPTIONS: dict[str, dict[str, str]] = {
    "gpu": {
        # The step is one CUDA graph. Its edges follow the data, so that pages are on their way while what needs no page runs;
        # by default all kernels stand in one chain.
        "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    },
}
