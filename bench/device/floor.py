"""What a decode step must take on paper, by a row of `bench.decode`: bytes over bandwidth."""

from __future__ import annotations

import functools

from bench.program import compile, estimate
from bench.program.targets import TARGETS, Target
from icejax.cache.options import cache_options, make_policy

NAMES = {"H200": "h200", "H100": "h100", "A100": "a100", "TPU v5 lite": "v5e", "TPU v6 lite": "v6e"}
ON_DEVICE = ("weight_bytes", "device_kv_bytes", "digest_bytes")
OVER_BUS = "moved_bytes_per_step"


def target(device: str) -> Target | None:
    """Returns what is known of a device, by the name JAX gives it; None: nothing."""
    return next((TARGETS[known] for name, known in NAMES.items() if name in device), None)


def shares(row: dict) -> dict[str, float]:
    """Returns which share of its step the bytes of each part would take, at full bandwidth; empty for a device not known."""
    found = target(row["device"])
    if found is None:
        return {}
    device = {name: row[name] / found.bandwidth / row["tpot_s"] for name in ON_DEVICE}
    return device | {OVER_BUS: row[OVER_BUS] / (1e6 * estimate.RATES[found.name][0].bus) / row["tpot_s"]}


def floor_ms(row: dict) -> float | None:
    """Returns the least milliseconds of a step: what it must read is read once while pages cross the bus."""
    found = target(row["device"])
    if found is None or row["policy"] not in ("full", "clustered"):
        return None
    options = tuple(row["options"]) if row["policy"] == "clustered" else ()
    sizes = (row["shape"], row["layers"], row["dtype"], row["policy"], row["budget"], options, row["batch"], row["context"])
    return _floor_ms(found.name, *sizes)


@functools.cache
def _floor_ms(device: str, shape, layers, dtype, name, budget, options, batch: int, context: int) -> float:
    policy = make_policy(name, cache_options(list(options), budget=budget))
    sizes = dict(batch=batch, context=context, new_tokens=64, backend=None)
    known, model = TARGETS[device], compile.abstract_model(shape, dtype=dtype, layers=layers)
    return estimate.floor(known, compile.decode_step(model, policy, known, **sizes))["ms"]
