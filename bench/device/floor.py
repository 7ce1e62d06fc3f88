"""What a decode step must take on paper: bytes over bandwidth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """Bytes per second by the data sheet of the device's memory, and of the bus to the host as it is reached in practice."""

    memory: float
    bus: float


PEAKS = {
    "H200": Peak(4.8e12, 52e9),
    "H100": Peak(3.35e12, 52e9),
    "A100": Peak(2.04e12, 26e9),
    "TPU v5 lite": Peak(0.82e12, 25e9),
    "TPU v6 lite": Peak(1.64e12, 25e9),
}
ON_DEVICE = ("weight_bytes", "device_kv_bytes", "digest_bytes")
OVER_BUS = "moved_bytes_per_token"


def peak(device: str) -> Peak | None:
    """Returns what a device can do on paper, by the name JAX gives it; None of one that is not known."""
    return next((found for name, found in PEAKS.items() if name in device), None)


def parts_ms(row: dict) -> dict[str, float]:
    """Returns the milliseconds that each part's bytes take, by a row of `bench.decode`; none for a device not known."""
    found = peak(row["device"])
    if found is None:
        return {}
    device = {name: 1e3 * row[name] / found.memory for name in ON_DEVICE}
    return device | {OVER_BUS: 1e3 * row[OVER_BUS] / found.bus}


def floor_ms(row: dict) -> float | None:
    """Returns the least milliseconds of a step: what is on the device is read once while pages cross the bus."""
    found = parts_ms(row)
    return max(sum(found[name] for name in ON_DEVICE), found[OVER_BUS]) if found else None
