"""Compiles the programs of an engine before the first request: a prompt of every padded size, and rows of every kind."""

from __future__ import annotations

from collections.abc import Callable

from icejax.api.engine import Engine
from icejax.checks.errors import InputError
from icejax.engine.buckets import SHORTEST, bucket
from icejax.engine.request import Request
from icejax.engine.sampling import Sampling
from icejax.text.grammar import Grammar

SALT = "warm-up"
DRAWN, PENALISED = Sampling(temperature=1.0), Sampling(temperature=1.0, frequency_penalty=0.1)
BEHIND = (16, 32, 64, 128, 256, 384, 512)  # tokens of texts behind a cached prefix, which are those of one prompt before
LONG = Grammar.regex("a{9}")
LOGPROBS = 20  # the most that a chat may ask for


def warm_up(engine: Engine, *, tokens: int, tell: Callable[[int, int], None] | None = None) -> None:
    """Runs prompts of all sizes up to `tokens`, and rows that draw, have penalties, a grammar, and report log-probabilities.

    Where llguidance cannot read the tokenizer, there is no row with a grammar; a request for one is told why.

    Args:
        tell: called with the number of prompts done, and the number in all.
    """
    most = min(tokens, engine.context_length - 3)
    if most < 1:
        return
    kinds = [dict(), dict(sampling=DRAWN), dict(sampling=PENALISED), dict(sampling=PENALISED, logprobs=LOGPROBS)]
    sizes = _sizes(most)
    prompts = [([0] * size, options) for size in sizes for options in (kinds if size == sizes[0] else [dict()])]
    prompts += [([0] * SHORTEST + [1] * size, dict()) for size in BEHIND if SHORTEST + size <= most]
    count = min(3, engine.max_new_tokens)
    requests = [Request(prompt=prompt, forced_tokens=[0] * count, **options) for prompt, options in prompts]  # without an end
    rows = [Request(prompt=[0] * sizes[0], grammar=LONG, **options) for options in kinds[:3]]
    for number, request in enumerate([*requests, *rows]):
        if tell is not None:
            tell(number, len(requests) + len(rows))
        try:
            engine.submit(request, cache_salt=SALT, max_new_tokens=count).result()
        except InputError:
            if request.grammar is None:
                raise
            break
    if tell is not None:
        tell(len(requests) + len(rows), len(requests) + len(rows))


def _sizes(most: int) -> list[int]:
    """Returns numbers of tokens, one of each padded size, up to `most`."""
    sizes, size = [min(SHORTEST, most)], SHORTEST
    while size < most:
        sizes.append(min(bucket(size + 1), most))
        size = bucket(size + 1)
    return sizes
