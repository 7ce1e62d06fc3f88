"""The least time of a decode step on paper, bytes over bandwidth, from a row of `bench.decode`: for `bench.device`'s page."""

from __future__ import annotations

import functools

from bench.program import compile, estimate
from bench.program.targets import TARGETS, Target
from icejax.cache.options import cache_options, make_policy

NAMES = {"H200": "h200", "H100": "h100", "A100": "a100", "TPU v5 lite": "v5e", "TPU v6 lite": "v6e"}
ON_DEVICE = ("weight_bytes", "device_kv_bytes", "digest_bytes")
OVER_BUS = "moved_bytes_per_step"


def target(device: str) -> Target | None:
    """Returns the target of a device by its name in JAX, or None."""
    return next((TARGETS[target_name] for name, target_name in NAMES.items() if name in device), None)


def shares(row: dict) -> dict[str, float]:
    """Returns the share of a step's time that the bytes of each part take at full bandwidth; empty for an unknown device.

    For example, 16 GB of weights at 4.8 TB/s take 3.33 ms, a share of 0.33 in a step of 10 ms.
    """
    known_target = target(row["device"])
    if known_target is None:
        return {}
    device = {name: row[name] / known_target.bandwidth / row["tpot_s"] for name in ON_DEVICE}
    return device | {OVER_BUS: row[OVER_BUS] / (1e6 * estimate.RATES[known_target.name][0].bus) / row["tpot_s"]}


def floor_ms(row: dict) -> float | None:
    """Returns the least milliseconds of a step, in which reads on the device overlap pages on the bus; None if not known."""
    known_target = target(row["device"])
    if known_target is None or row["policy"] not in ("full", "clustered"):
        return None
    options = tuple(row["options"]) if row["policy"] == "clustered" else ()
    sizes = (row["shape"], row["layers"], row["dtype"], row["policy"], row["budget"], options, row["batch"], row["context"])
    return _floor_ms(known_target.name, *sizes)


@functools.cache
def _floor_ms(device: str, shape, layers, dtype, name, budget, options, batch: int, context: int) -> float:
    policy = make_policy(name, cache_options(list(options), budget=budget))
    sizes = dict(batch=batch, context=context, new_tokens=64, backend=None)
    device_target, model = TARGETS[device], compile.abstract_model(shape, dtype=dtype, layers=layers)
    return estimate.floor(device_target, compile.decode_step(model, policy, device_target, **sizes))["ms"]
