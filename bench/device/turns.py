"""Questions in turns about long code, with one cache: ``python -m bench.device.turns MODEL TOKENS CACHE [SAMPLES]``.

The command runs the task `multi_turn_code` of `icejax evaluate` on a model whose context is lengthened by YaRN: 4 times, or as
many times as TOKENS need. It prints a row with the share of right answers by turn. It needs the extra `evaluate`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import jax

import icejax
from icejax.cache.options import make_policy
from icejax.checkpoint.folder import resolve
from icejax.checkpoint.load import read_config
from icejax.runtime import devices

TASK = "multi_turn_code"
FACTOR = 4  # least factor of the context


def lengthened(source: Path, folder: Path, *, tokens: int) -> int:
    """Makes a folder of links to a model's files, with YaRN for at least so many tokens in its config; returns the factor."""
    checkpoint, factor = resolve(source), FACTOR
    while factor * (context := read_config(checkpoint).max_position_embeddings) < tokens:
        factor *= 2
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    raw = json.loads((checkpoint / "config.json").read_text())
    raw["rope_parameters"] |= dict(rope_type="yarn", factor=float(factor), original_max_position_embeddings=context)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(raw))
    return factor


def main(argv: list[str]) -> int:
    from icejax.evaluation.harness import HarnessModel
    from icejax.evaluation.run import evaluate

    source, tokens, cache, samples = Path(argv[0]), int(argv[1]), argv[2], int(argv[3]) if len(argv) > 3 else 2
    with tempfile.TemporaryDirectory() as folder:
        factor = lengthened(source, Path(folder), tokens=tokens)
        model, tokenizer = icejax.load(folder)
    policy, started = make_policy(cache, {}), time.perf_counter()
    scores = evaluate(HarnessModel(model, tokenizer, cache=policy, batch_size=1), [TASK], lengths=(tokens,), limit=samples)
    turns = {metric.partition(",")[0]: round(value, 4) for (_, metric), value in scores.totals.items()}
    row = dict(model=source.name, length=tokens, yarn=factor, cache=cache, budget=policy.budget, samples=samples) | turns
    row |= dict(seconds=round(time.perf_counter() - started, 1), dtype=model.dtype)
    print(json.dumps(row | dict(device=devices.device_name(), jax=jax.__version__)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
