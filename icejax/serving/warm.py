"""Compiles the programs of an engine before the first request: a prompt of every padded size, and rows of every kind."""

from __future__ import annotations

from collections.abc import Callable

from icejax.api.engine import Engine
from icejax.engine.buckets import SHORTEST, bucket
from icejax.engine.request import Request
from icejax.engine.sampling import Sampling

SALT = "warm-up"  # and the number of tokens, or a prompt would find the one before it and not be prefilled
DRAWN, PENALISED = Sampling(temperature=1.0), Sampling(temperature=1.0, frequency_penalty=0.1)
BIASED = [Sampling(temperature=temperature, logit_bias={0: -1.0}) for temperature in (0.0, 1.0)]  # as by `ignore_eos`
STEPS = 33  # tokens of the first answer: the window's pages of usual sizes become full
BEHIND = (16, 32, 64, 128, 256, 384, 512)  # tokens of texts behind a cached prefix, which are those of one prompt before
LOGPROBS = 20  # the most that a chat may ask for


def warm_up(engine: Engine, *, tokens: int, tell: Callable[[int, int], None] | None = None) -> None:
    """Runs prompts of all sizes up to `tokens`, and rows that draw, have penalties and report log-probabilities.

    Args:
        tell: called with the number of prompts done, and the number in all.
    """
    most = min(tokens, engine.context_length - 3)
    if most < 1:
        return
    kinds = [dict(), dict(sampling=DRAWN), dict(sampling=PENALISED), dict(sampling=PENALISED, logprobs=LOGPROBS)]
    kinds += [dict(sampling=sampling) for sampling in BIASED]
    sizes = _sizes(most)
    prompts = [([0] * size, options, f"{SALT} {size}") for size in sizes for options in (kinds if size == sizes[0] else [{}])]
    prompts += [([0] * SHORTEST + [1] * size, {}, SALT) for size in (0, *BEHIND) if SHORTEST + size <= most]
    for number, (prompt, options, salt) in enumerate(prompts):
        if tell is not None:
            tell(number, len(prompts))
        forced = [0] * min(3 if number else STEPS, engine.max_new_tokens, engine.context_length - len(prompt))
        engine.submit(Request(prompt=prompt, forced_tokens=forced), cache_salt=salt, **options).result()
    if tell is not None:
        tell(len(prompts), len(prompts))


def _sizes(most: int) -> list[int]:
    """Returns numbers of tokens, one of each padded size, up to `most`."""
    sizes, size = [min(SHORTEST, most)], SHORTEST
    while size < most:
        sizes.append(min(bucket(size + 1), most))
        size = bucket(size + 1)
    return sizes
