"""Decodes a published model on one device and on several: ``python -m tests.helpers.published_on_devices FILE COUNT CACHE...``.

It runs in a process of its own, which has COUNT CPU devices. CACHE is `full`, or a name and a budget such as `clustered-64`. For each
a JSON line says how the logits behind `PROMPT_TOKENS` tokens of real text and along `NEW_TOKENS` greedy ones compare, and whether
the text is the same.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
PROMPT_TOKENS, NEW_TOKENS = 300, 16


def compared(file: Path, count: int, *caches: str) -> list[dict]:
    """Returns how a model on `count` devices compares with the model on one, for each cache."""
    environment = dict(os.environ) | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", __name__, str(file), str(count), *caches]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stderr[-2000:]
    return list(map(json.loads, process.stdout.splitlines()))


def _decoded(file: str, mesh: int | None, caches: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the tokens and logits of each cache."""
    import icejax
    from icejax.cache.options import make_policy
    from tests.helpers.run import greedy

    model, tokenizer = icejax.load(file, mesh=mesh)
    prompt = tokenizer((ROOT / "LICENSE").read_text()).input_ids[:PROMPT_TOKENS]
    assert len(prompt) == PROMPT_TOKENS
    named = [cache.partition("-") for cache in caches]
    policies = [make_policy(name, dict(budget=int(budget)) if budget else {}) for name, _, budget in named]
    return [greedy(model, policy, [prompt], NEW_TOKENS)[:2] for policy in policies]


def _main(file: str, count: str, *caches: str) -> None:
    one = _decoded(file, None, list(caches))
    gc.collect()  # one model at a time is in memory
    several = _decoded(file, int(count), list(caches))
    for cache, (tokens, logits), (own_tokens, own_logits) in zip(caches, one, several, strict=True):
        same, error = bool((tokens == own_tokens).all()), float(np.abs(logits - own_logits).max())
        print(json.dumps(dict(cache=cache, same_tokens=same, error=error)), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
