"""The rows of `bench.compounding`: a policy at a budget on one text, whose seed is that of everything drawn."""

from __future__ import annotations

import platform
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench import panel, texts
from bench.attention.capture import needle_prompt
from bench.compare import cells
from bench.compare.cells import Contender
from bench.compare.forced import Adaptive
from bench.compare.text import SHORT
from bench.compounding.policies import seeded
from bench.compounding.steps import Prompt, Stepwise
from bench.needle import task
from icejax.cache.options import make_policy
from icejax.cache.registry import Full
from icejax.engine.snapshot.fingerprint import weights_sum
from icejax.models.decoder import CausalLM
from icejax.runtime import devices

KEY = ("model", "policy", "budget", "length", "steps", "seed")
FIGURES = (
    *("error", "error_95", "kl", "agreement", "diverged", "equal", "own_kl", "own_agreement"),
    *("moved", "moved_95", "same", "moved_bytes"),
)
REFERENCE = Contender("full", "all", None, Full())
FACTS = 16  # pass keys in a text of bytes


def read(path: Path) -> dict[tuple, dict]:
    """Returns the rows of a file by `KEY`, without rows that were cut off."""
    return cells.lines(path, key=KEY, fields={*KEY, *FIGURES, "tokens", "crc", "options", "text"})


def measured(
    name: str, model: CausalLM, tokenizer: Any, contenders: Collection[Contender], *, length: int, steps: int,
    seeds: Sequence[int], old: dict[tuple, dict]
) -> Iterator[dict]:  # fmt: skip
    """Yields the rows that are missing; the first of each seed is that of the full cache, whose text the others follow.

    A row of another text with the same seed, as another version of Python has, counts as missing, and a row of other weights.

    Args:
        name: the model's name.
        length: tokens of a text with its question.
        steps: tokens of a continuation, without the one that prefill gives.
        old: rows by `KEY`.
    """
    adaptive, weights = Adaptive(model, tokenizer, length), weights_sum(model)
    rows = cells.of_model(old, name, weights)
    for seed in seeds:
        prompt, found = None, document(tokenizer, length, seed)
        crc = zlib.crc32(repr(found).encode())
        for contender in (REFERENCE, *contenders):
            key = (name, contender.name, contender.asked, length, steps, seed)
            row = dict(zip(KEY, key, strict=True)) | dict(tokens=contender.tokens, crc=crc, options=None, text=None)
            known = rows.get(key, {}).get("crc") == crc
            if contender is REFERENCE and known:
                reference = rows[key]["text"]
            if known:
                continue
            if prompt is None:
                prompt = Prompt.read(model, found)
                asked = None if contender is REFERENCE else prompt.continued(reference)
            sizes = dict(length=length, steps=steps)
            if contender is REFERENCE:
                asked, figures = Stepwise(model, contender.policy, **sizes).reference(prompt, steps)
                row |= dict(text=asked.continuation) | figures
            else:
                row |= dict(options=adaptive.options(contender, [*rows.values()]) or None)
                policy = make_policy(contender.name, row["options"]) if row["options"] else contender.policy
                row |= Stepwise(model, seeded(policy, seed), **sizes).follow(prompt, asked)
            versions = dict(jax=jax.__version__, python=platform.python_version())
            rows[key] = row | dict(weights=weights, dtype=model.dtype, device=devices.device_name()) | versions
            yield rows[key]
            jax.clear_caches()  # the programs of many subjects need more mappings than Linux allows


def document(tokenizer: Any, length: int, seed: int) -> texts.Document:
    """Returns a text and a question after it: to write a function of the text again or, where tokens are bytes, a pass key."""
    if not panel.reads_bytes(tokenizer):
        return texts.document(tokenizer, "function", tokens=length - SHORT, number=seed)
    end = length - SHORT
    tokens, answer = needle_prompt(np.random.default_rng(seed), length=end + len(task.question("ab")), facts=FACTS)
    return texts.Document(tokens[:end], (texts.Question(tokens[end:], answer),))
