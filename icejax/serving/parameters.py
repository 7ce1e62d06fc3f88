"""The options of an answer in a request's body, as the engine takes them. `completions` and `chat` call it."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

from icejax.checks.errors import InputError
from icejax.checks.numbers import is_unicode
from icejax.engine.sampling import Sampling
from icejax.serving.errors import ApiError
from icejax.serving.schemas import AnswerFields
from icejax.text.detokenize import stop_strings

SAMPLING = [field.name for field in dataclasses.fields(Sampling)]
# Fields that ask for something which is not built; the names of their values that ask for nothing.
NOT_BUILT = (
    "min_tokens use_beam_search prompt_logprobs stop_token_ids logits_processors functions audio web_search_options"
).split()
NO_EOS = -100.0  # logit bias of tokens that must not come


def refuse_not_built(fields: AnswerFields) -> None:
    """Raises ApiError 400 for a field that asks for something which is not built or needs another field, by its name."""
    if fields.stream_options is not None and not fields.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    for name in NOT_BUILT:
        if getattr(fields, name, None):
            raise ApiError(400, f"{name} is not supported: leave it out", param=name, code="unsupported_parameter")


def sampling_of(fields: AnswerFields, defaults: Mapping[str, Any], eos: tuple[int, ...]) -> Sampling:
    """Returns the sampling options of a body, over the server's defaults and then OpenAI's (temperature 1).

    Args:
        eos: the tokens that end a text, which `ignore_eos` keeps from coming.
    """
    given = {name: getattr(fields, name) for name in SAMPLING if getattr(fields, name) is not None}
    if given.get("top_k") == -1:  # vLLM's sign for all
        given["top_k"] = 0
    if fields.ignore_eos:
        given["logit_bias"] = dict.fromkeys(map(str, eos), NO_EOS) | (fields.logit_bias or {})
    for name in given:
        checked(name, lambda name=name: Sampling(**{name: given[name]}))
    return Sampling(**{"temperature": 1.0} | dict(defaults) | given)


def answer_options(fields: AnswerFields, *, sampling: Sampling, limit: int) -> dict[str, Any]:
    """Returns the options of `Engine.submit` that all endpoints share.

    Args:
        limit: most tokens of the answer.
    """
    stop = checked("stop", lambda: stop_strings(fields.stop or ()))
    seed = secrets.randbits(32) if fields.seed is None else fields.seed % 2**32
    return dict(sampling=sampling, stop=stop, seed=seed, max_new_tokens=limit)


def salt_of(fields: AnswerFields, key: str | None) -> str:
    """Returns the salt of a request's cached prefixes: callers with other keys or other salts share none."""
    if not is_unicode(fields.cache_salt or ""):
        raise ApiError(400, "cache_salt must be Unicode text", param="cache_salt")
    owner = "" if key is None else hashlib.sha256(key.encode()).hexdigest()
    return f"{owner}:{fields.cache_salt or ''}"


def checked(name: str, make: Any) -> Any:
    """Returns what `make` returns; its InputError becomes a 400 for the field `name`."""
    try:
        return make()
    except InputError as error:
        raise ApiError(400, str(error), param=name) from None
