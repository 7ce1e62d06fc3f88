"""The sampling that a model's makers propose in generation_config.json. Python callers and the option --sampling call it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from icejax.api.generate import ASSETS
from icejax.checkpoint.folder import resolve
from icejax.checkpoint.generation_config import NAME, proposed_sampling
from icejax.checks.errors import InputError
from icejax.engine.sampling import Sampling


def model_sampling(path: str | Path = ASSETS, *, revision: str | None = None, **options: Any) -> Sampling:
    """Returns the sampling options of a checkpoint's generation_config.json, greedy ones unless its `do_sample` is true.

    They are `temperature`, `top_k`, `top_p`, `min_p` and `repetition_penalty`; the log warns of others.

    Args:
        path, revision: as in `load`.
        options: options of `Sampling` that override those of the file.

    Raises:
        InputError: the checkpoint cannot be read, or an option is out of range.
    """
    return sampling_over(proposed_sampling(resolve(path, revision=revision)), options)


def sampling_over(proposed: Mapping[str, Any], options: Mapping[str, Any]) -> Sampling:
    """Returns `options` over the options that generation_config.json proposes; InputError for one that is out of range."""
    used = {name: value for name, value in proposed.items() if name not in options}
    try:
        Sampling(**used)
    except InputError as error:
        raise InputError(f"{NAME}: {error}: set it by an option") from None
    return Sampling(**used, **options)
