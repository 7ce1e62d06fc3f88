"""Compiles the programs of an engine before the first request: a prompt of every padded size, rows and steps of every kind."""

from __future__ import annotations

from collections.abc import Callable

from icejax.api.engine import Engine
from icejax.checks.errors import InputError
from icejax.engine.buckets import SHORTEST, bucket
from icejax.engine.request import Request
from icejax.engine.sampling import Sampling
from icejax.engine.serving.prefix_cache import TAIL
from icejax.text.grammar.rules import Grammar

SALT = "warm-up"  # and the number of tokens, or a prompt would find the one before it and not be prefilled
KINDS = [Sampling(temperature=heat, frequency_penalty=penalty) for heat in (0.0, 1.0) for penalty in (0.0, 0.1)]
STEPS = 33  # tokens of the first answer: the window's pages of usual sizes become full
BEHIND = (16, 32, 64, 128, 256, 384, 512, 528)  # tokens of texts after a cached prefix; the last is computed in two pieces
LONG = Grammar.regex("a{9}")
LOGPROBS = 20  # the most that a chat may ask for


def warm_up(engine: Engine, *, tokens: int, tell: Callable[[int, int], None] | None = None) -> None:
    """Runs prompts of all sizes up to `tokens`, and in steps of all sizes rows that draw, have penalties or a grammar.

    Also rows that report log-probabilities, or attention where there are pages to show. Where llguidance cannot read the
    tokenizer, there is no row with a grammar; a request for one is told why.

    Args:
        tell: called with the number of requests done, and the number in all.
    """
    most = min(tokens, engine.context_length - 3)
    if most < 1:
        return
    *smaller, places = engine.step_sizes
    # The smallest size comes last, and so stays the least.
    groups = {size: _requests(engine, most, all_prompts=size == places) for size in (places, *reversed(smaller))}
    count, total, reads_grammars = 0, sum(map(len, groups.values())), True
    for size, requests in groups.items():
        engine.compile_for(size)
        for request, salt in requests:
            if tell is not None:
                tell(count, total)
            count += 1
            if request.grammar is not None and not reads_grammars:
                continue
            try:
                engine.submit(request, cache_salt=salt).result()
            except InputError:
                if request.grammar is None:
                    raise
                reads_grammars = False
    if tell is not None:
        tell(total, total)


def _requests(engine: Engine, most: int, *, all_prompts: bool) -> list[tuple[Request, str]]:
    """Returns requests for rows of every kind, and their salts.

    Args:
        most: most tokens of a prompt.
        all_prompts: whether there are prompts of every size, too.
    """
    kinds, sizes = [dict(sampling=sampling) for sampling in KINDS], _sizes(most)
    asked = [*kinds, kinds[-1] | dict(logprobs=LOGPROBS), *([dict(prompt_logprobs=LOGPROBS)] if all_prompts else [])]
    prompts = [([0] * sizes[0], options, f"{SALT} {sizes[0]}") for options in asked]
    if all_prompts:
        # A prompt that explains runs the units of any other prompt, but a prefill in one piece is another program.
        ways = [dict(explain=True)] if engine.can_explain else []
        ways += [] if ways and engine.prefill_share < 1 else [{}]
        prompts += [([0] * size, way, f"{SALT} {size}") for size in sizes for way in ways]
        behind = [[1 + number] * size for number, size in enumerate((0, *BEHIND))]  # no text begins with another one
        # The tail of a long prompt is computed after the cache of its beginning, also for rows with penalties.
        options, behind = {TAIL: kinds[-1]}, [text for text in behind if SHORTEST + len(text) <= most]
        prompts += [([0] * SHORTEST + text, options.get(len(text), {}), SALT) for text in behind]
    requests = []
    for prompt, options, salt in prompts:
        count = min(3 if requests else STEPS, engine.max_new_tokens, engine.context_length - len(prompt))
        requests.append((Request(prompt=prompt, forced_tokens=[0] * count, **options), salt))  # without an end
    count = min(3, engine.max_new_tokens)
    rows = [Request(prompt=[0] * sizes[0], grammar=LONG, max_new_tokens=count, **options) for options in kinds]
    return requests + [(row, SALT) for row in rows]


def _sizes(most: int) -> list[int]:
    """Returns numbers of tokens, one of each padded size, up to `most`."""
    sizes, size = [min(SHORTEST, most)], SHORTEST
    while size < most:
        sizes.append(min(bucket(size + 1), most))
        size = bucket(size + 1)
    return sizes
