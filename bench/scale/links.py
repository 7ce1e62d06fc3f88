"""Peak rates of devices and of their links, from the vendors' specifications, and the least time of a step by each."""

from __future__ import annotations

from dataclasses import dataclass

from icejax.checks.errors import InputError, suggestion


@dataclass(frozen=True)
class Machine:
    """A host with devices.

    Attributes:
        title: its name on the page.
        flops: bf16 operations per second of a device, without sparsity.
        memory: bytes per second of a device's memory.
        host: bytes per second from host memory to a device, one way.
        links: bytes per second that a device sends to others, by the number of devices.
        sources: where the rates are published.
    """

    title: str
    flops: float
    memory: float
    host: float
    links: dict[int, float]
    sources: str


MACHINES = {
    "h100": Machine(
        "H100 SXM",
        989e12,
        3.35e12,
        64e9,
        {2: 450e9, 4: 450e9, 8: 450e9},
        "NVIDIA's H100 data sheet: 989 TFLOPS in bf16 without sparsity, 3.35 TB/s of HBM3, NVLink 900 GB/s and PCIe 5.0 "
        "128 GB/s, both directions together",
    ),
    "v5e": Machine(
        "TPU v5e",
        197e12,
        819e9,
        16e9,
        {2: 50e9, 4: 100e9, 8: 100e9},
        "Google's page on the TPU v5e: 197 TFLOPS in bf16, 819 GB/s of HBM2, ICI 400 GB/s in both directions over four ports. "
        "Of 2 devices (1x2) each uses one port; of 4 (2x2) and 8 (2x4) the corners use two. The page states no rate of the "
        "link to the host: 16 GB/s is that of Google DeepMind's book *How to Scale Your Model*",
    ),
}


def machine(name: str) -> Machine:
    """Returns the machine of a target of `bench.program`; InputError names those whose links are known."""
    if name not in MACHINES:
        raise InputError(f"--target must be of {', '.join(MACHINES)}, got {name!r}{suggestion(name, MACHINES)}")
    return MACHINES[name]


def bounds(on: Machine, devices: int, counted: dict[str, float]) -> dict[str, float]:
    """Returns the least milliseconds of a step by each rate.

    A sum of x bytes over N devices takes each 2 x (N - 1) / N bytes over its links (a ring, or a scatter and a gather). The
    starts of the sums, and the host's own memory, which all devices share, are not counted.

    Args:
        counted: `flops`, and `device_bytes`, `host_bytes` and `collective_bytes` of a device.
    """
    sent = 0.0 if devices == 1 else 2 * (devices - 1) / devices * counted["collective_bytes"] / on.links[devices]
    seconds = dict(
        flops=counted["flops"] / on.flops,
        memory=counted["device_bytes"] / on.memory,
        link=sent,
        host=counted["host_bytes"] / on.host,
    )
    return {name: round(value * 1000, 3) for name, value in seconds.items()}
