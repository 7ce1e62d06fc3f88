"""The record of a run beside its scores: model, cache, versions, and the tokens, seconds and bytes of its answers."""

from __future__ import annotations

import dataclasses
import platform
import statistics
from importlib import metadata
from typing import Any

import jax

from icejax import __version__
from icejax.cache.registry import display_name
from icejax.engine.snapshot.fingerprint import weights_sum
from icejax.evaluation.harness import HarnessModel

ABOUT = "icejax"  # key in the harness's results


def about(harness_model: HarnessModel, name: str, *, chat: bool, system: str | None, quantize: str | None) -> dict[str, Any]:
    """Returns the record of a run, as JSON; all processes of a group call it.

    Args:
        name: of the model.
        chat, system, quantize: as in the command line.
    """
    model, policy = harness_model.model, harness_model.cache
    versions = {"icejax": __version__, "python": platform.python_version()}
    versions |= {package: metadata.version(package) for package in ("jax", "lm_eval", "transformers")}
    return dict(
        model=name,
        model_type=model.config.model_type,
        dtype=model.dtype,
        quantize=quantize,
        weights=weights_sum(model),
        weight_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(model)),
        cache=display_name(policy),
        budget=policy.budget,
        cache_options={key: str(value) for key, value in dataclasses.asdict(policy).items()},
        context_length=harness_model.max_length,
        **harness_model.place,
        chat=chat,
        system=system,
        versions=versions,
        tasks={task: _took(harness_model, keys) for task, keys in harness_model.asked.items()},
    )


def _took(harness_model: HarnessModel, keys: set[str]) -> dict[str, Any]:
    """Returns the cost of the answers to a task: medians of tokens and seconds, and the most bytes.

    Bytes are reserved for a row. Seconds per token are measured on rows that decode together, `batch_size` of them; answers of
    an earlier run with another batch size, or on another device, do not count.
    """
    rows = [harness_model.answers.measured(key) for key in keys]
    timed = [row for row in rows if {name: row.get(name) for name in harness_model.place} == harness_model.place]

    def median(name: str, rows: list[dict[str, Any]] = rows) -> float | None:
        values = [row[name] for row in rows if row[name] is not None]
        return statistics.median(values) if values else None

    seconds = median("tpot_s", timed)
    return dict(
        answers=len(rows),
        prompt_tokens=median("prompt_tokens"),
        new_tokens=median("new_tokens"),
        device_bytes=max(row["device_kv_bytes"] + row["digest_bytes"] for row in rows),
        host_bytes=max(row["host_kv_bytes"] for row in rows),
        seconds_per_token=seconds,
        tokens_per_s=None if not seconds else 1 / seconds,
    )
