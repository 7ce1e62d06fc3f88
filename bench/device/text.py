"""The bundled model's text here against that of the CPU, token by token: ``python -m bench.device.text PROMPT TOKENS DIR``.

Both run at once, the CPU in a process of its own. A row per cache and dtype: the tokens, how many are alike before the first
that differs, how far apart the logits are until then, and at that token the CPU's margin between its choice and the device's:
a small one is rounding. Arrays of the CPU go through files in DIR.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import icejax
from icejax.api.generate import ASSETS
from icejax.engine.decode_step import DecodePrograms
from icejax.engine.plan import make_plan
from icejax.engine.prefill import prefill
from icejax.runtime import devices

CASES = [(cache, dtype) for dtype in ("float32", "bfloat16") for cache in ("full", "clustered")]
ALONE = "--alone"  # only writes the arrays


def greedy(cache: str, dtype: str, length: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens i32[T] that follow `length` tokens of the bundled text, and the logits f32[T, V] of their choice."""
    model, tokenizer = icejax.load(dtype=dtype)
    prompt = tokenizer.encode((ASSETS / "prompt.txt").read_text())[:length]
    policy = icejax.Clustered(budget=64) if cache == "clustered" else icejax.Full()
    plan = make_plan(model, policy, batch_size=1, prompt_tokens=len(prompt), new_tokens=tokens)
    state, step, pool = prefill(model, [prompt], plan)
    decoding, steps = DecodePrograms(model, plan), [step]
    for _ in range(tokens - 1):
        state, step, pool = decoding.step(state, pool)
        steps.append(step)
    chosen = np.concatenate([np.asarray(each.tokens) for each in steps])
    return chosen, np.concatenate([np.asarray(each.logits) for each in steps])


def compared(here: tuple[np.ndarray, np.ndarray], there: tuple[np.ndarray, np.ndarray]) -> dict:
    """Returns how far the tokens and logits of the device (`here`) are those of the CPU (`there`)."""
    (tokens, logits), (expected, their_logits) = here, there
    differing = np.flatnonzero(tokens != expected)
    alike = int(differing[0]) if differing.size else len(tokens)
    # The first token that differs was still chosen behind the same text.
    apart = np.abs(logits[: alike + 1] - their_logits[: alike + 1]).max()
    found = dict(tokens=len(tokens), alike=alike, logits_apart=float(apart))
    if differing.size:
        mine, theirs = int(tokens[alike]), int(expected[alike])
        margin = float(their_logits[alike, theirs] - their_logits[alike, mine])
        found |= dict(token=mine, token_cpu=theirs, margin_cpu=margin)
    return found


def rows(length: int, tokens: int, folder: Path) -> Iterator[dict]:
    """Yields a row per case."""
    command = [sys.executable, "-m", "bench.device.text", str(length), str(tokens), str(folder), ALONE]
    other = subprocess.Popen(command, env=os.environ | dict(JAX_PLATFORMS="cpu"), stdout=sys.stderr)
    mine = {}
    for case in CASES:
        try:
            mine[case] = greedy(*case, length, tokens)
        except Exception as error:  # one case must not cost the others
            yield dict(policy=case[0], dtype=case[1], fault=f"{type(error).__name__}: {error}".splitlines()[0][:200])
    if status := other.wait():
        raise RuntimeError(f"the CPU's process fails with status {status}")
    device = devices.device_name()
    for (cache, dtype), here in mine.items():
        with np.load(folder / f"{cache}-{dtype}.npz") as there:
            yield dict(policy=cache, dtype=dtype, device=device) | compared(here, (there["tokens"], there["logits"]))


def main(argv: list[str]) -> int:
    length, tokens, folder = int(argv[0]), int(argv[1]), Path(argv[2])
    if ALONE in argv:
        for cache, dtype in CASES:
            chosen, logits = greedy(cache, dtype, length, tokens)
            np.savez(folder / f"{cache}-{dtype}.npz", tokens=chosen, logits=logits)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows(length, tokens, folder):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
