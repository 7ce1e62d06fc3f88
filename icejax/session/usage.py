"""How many bytes of a session's cache are reserved, and how many of them hold tokens. `/stats` of `icejax chat` shows it.

Example: a full cache of 2 layers with room for 1,024 tokens of 1 KiB each reserves 2 MiB; after 256 tokens 0.5 MiB are used.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from icejax.cache.pool.page_format import pool_bytes, without_codes
from icejax.engine.decode.run import Run
from icejax.engine.plan import Plan
from icejax.session.session import Session


@dataclass(frozen=True)
class Usage:
    """Bytes of a cache with all its rows: keys, values and digests.

    Attributes:
        device, host: bytes that are reserved on the device, and for the pool in host memory.
        device_used, host_used: bytes of them that hold tokens or describe them.
    """

    device: int
    device_used: int
    host: int
    host_used: int


def session_usage(session: Session) -> Usage | None:
    """Returns the bytes that a session's cache reserves and uses; None before the first text, and after an interrupted one."""
    if session._cache.run is None or session._cache.run.interrupted:
        return None
    return _usage(session._cache.plan, session._cache.run)


def _usage(plan: Plan, run: Run) -> Usage:
    """Returns the usage of a run's cache between two steps."""
    cache, reserved, used, slots = run.state.cache, 0, 0.0, 0
    for i, (policy, state) in enumerate(zip(plan.policies, cache.layers, strict=True)):
        report, size = policy.report(state, cache.lengths), sum(x.nbytes for x in jax.tree.leaves(state))
        share = describing = int(report.slots.sum()) / (report.allocated * plan.spec.batch_size)
        if i in plan.pooled:
            counts = np.asarray(policy.counts(state))
            slots, describing = slots + int(counts.sum()), float((counts > 0).mean())
        used += share * (size - report.digest_bytes) + describing * report.digest_bytes
        reserved += size
    host = pool_bytes(run.pool)
    # The pool's arrays have one entry per extent, layer, page and KV head.
    pool_slots = int(np.prod(without_codes(run.pool).shape[:4])) * plan.page_size if host else 1
    return Usage(reserved, round(used), host, host * slots // pool_slots)
