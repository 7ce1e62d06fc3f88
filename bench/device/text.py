"""The bundled model's greedy text on the device and on the CPU, compared: ``python -m bench.device.text PROMPT TOKENS DIR``.

PROMPT and TOKENS are numbers of tokens. Device and CPU run at the same time, the CPU in a process of its own, whose arrays go
through files in DIR. The output is one row per cache and dtype: the number of tokens, the number before the first that differs,
the largest difference of logits up to there, and at that token the CPU's margin between its own choice and the device's. A
small margin means rounding.
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
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.plan import make_plan
from icejax.engine.prefill import prefill
from icejax.runtime import devices

CASES = [(cache, dtype) for dtype in ("float32", "bfloat16") for cache in ("full", "clustered")]
ALONE = "--alone"  # option of the CPU's process, which only writes the arrays


def greedy(cache: str, dtype: str, length: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the greedy tokens i32[T] after `length` tokens of the bundled prompt, and their logits f32[T, V]."""
    model, tokenizer = icejax.load(dtype=dtype)
    prompt = tokenizer.encode((ASSETS / "prompt.txt").read_text())[:length]
    policy = icejax.Clustered(budget=64) if cache == "clustered" else icejax.Full()
    plan = make_plan(model, policy, batch_size=1, prompt_tokens=len(prompt), new_tokens=tokens)
    state, step, pool = prefill(model, [prompt], plan)
    decoding, steps = DecodePrograms(model, plan), [step]
    for _ in range(tokens - 1):
        state, step, pool = decoding.step(state, pool)
        steps.append(step)
    greedy_tokens = np.concatenate([np.asarray(step.tokens) for step in steps])
    return greedy_tokens, np.concatenate([np.asarray(step.logits) for step in steps])


def compared(here: tuple[np.ndarray, np.ndarray], there: tuple[np.ndarray, np.ndarray]) -> dict:
    """Compares tokens and logits of the device (`here`) with the CPU's (`there`)."""
    (tokens, logits), (expected, cpu_logits) = here, there
    differing = np.flatnonzero(tokens != expected)
    alike = int(differing[0]) if differing.size else len(tokens)
    # The first token that differs was chosen after the same text, so its logits count too.
    difference = np.abs(logits[: alike + 1] - cpu_logits[: alike + 1]).max()
    row = dict(tokens=len(tokens), alike=alike, logits_apart=float(difference))
    if differing.size:
        device_token, cpu_token = int(tokens[alike]), int(expected[alike])
        margin = float(cpu_logits[alike, cpu_token] - cpu_logits[alike, device_token])
        row |= dict(token=device_token, token_cpu=cpu_token, margin_cpu=margin)
    return row


def rows(length: int, tokens: int, folder: Path) -> Iterator[dict]:
    """Yields a row per cache and dtype."""
    command = [sys.executable, "-m", "bench.device.text", str(length), str(tokens), str(folder), ALONE]
    cpu_process = subprocess.Popen(command, env=os.environ | dict(JAX_PLATFORMS="cpu"), stdout=sys.stderr)
    by_case = {}
    for case in CASES:
        try:
            by_case[case] = greedy(*case, length, tokens)
        except Exception as error:  # a failed case must not prevent the others
            yield dict(policy=case[0], dtype=case[1], fault=f"{type(error).__name__}: {error}".splitlines()[0][:200])
    if status := cpu_process.wait():
        raise RuntimeError(f"the CPU's process fails with status {status}")
    device = devices.device_name()
    for (cache, dtype), device_arrays in by_case.items():
        with np.load(folder / f"{cache}-{dtype}.npz") as cpu_arrays:
            yield dict(policy=cache, dtype=dtype, device=device) | compared(
                device_arrays, (cpu_arrays["tokens"], cpu_arrays["logits"])
            )


def main(argv: list[str]) -> int:
    length, tokens, folder = int(argv[0]), int(argv[1]), Path(argv[2])
    if ALONE in argv:
        for cache, dtype in CASES:
            greedy_tokens, logits = greedy(cache, dtype, length, tokens)
            np.savez(folder / f"{cache}-{dtype}.npz", tokens=greedy_tokens, logits=logits)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows(length, tokens, folder):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
