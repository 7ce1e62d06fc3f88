"""Rates by which `api.choice` estimates the time that a decode step spends on its cache. They are committed, never timed.

They agree with every pair of rows of a full and a clustered cache that was measured (tests/api/test_choice.py). Where the two
caches take about the same time, an error of a rate moves the choice and hardly the time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Microseconds of a decode step on a device.

    Attributes:
        device: for a megabyte (10^6 bytes) read from the device's memory.
        host: for a megabyte that comes from host memory.
        scored: for a megabyte from host memory and each query head of a KV head; a CPU does not wait for memory, but computes.
        layer: for a layer with pages, whatever it reads.
        measured: whether icejax ran on such a device; else the figures are those of `bench.program`'s estimates.
    """

    device: float
    host: float = 0.0
    scored: float = 0.0
    layer: float = 0.0
    measured: bool = False


# A CPU: two cores, fp32; bench/results/decode.md, and SmolLM2-135M and Qwen2.5-Coder-0.5B at 4,022 to 8,192 tokens.
# An H200: Llama-3.1-8B in bf16 at batch 1 and 4; bench/results/gpu.md.
RATES = {
    "cpu": Rates(device=35, scored=85, layer=150, measured=True),
    "NVIDIA H200": Rates(device=0.268, host=34.5, layer=40, measured=True),
    "NVIDIA H100": Rates(device=0.327, host=34.5, layer=40),
    "NVIDIA A100": Rates(device=0.536, host=55, layer=40),
    "TPU v5 lite": Rates(device=1.53, host=200),
    "TPU v6 lite": Rates(device=0.76, host=195),
}
UNKNOWN = {"cpu": "cpu", "gpu": "NVIDIA A100", "tpu": "TPU v5 lite"}  # as which another device of a platform counts


def rates_of(platform: str, kind: str) -> Rates:
    """Returns the rates of a device by its platform (cpu, gpu or tpu) and kind, such as `NVIDIA H100 80GB HBM3`."""
    return RATES[next((name for name in RATES if kind.startswith(name)), UNKNOWN[platform])]
