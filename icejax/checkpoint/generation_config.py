"""Reads generation_config.json: the end tokens of a text, and the sampling that a model's makers propose.

`icejax.checkpoint.load` takes the end tokens; `icejax.api.model_sampling` and the option --sampling take the sampling.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from icejax.checkpoint.readers import huggingface
from icejax.checks.errors import quoted
from icejax.models.hf.fields import Fields

NAME = "generation_config.json"
SUPPORTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Fields that change the tokens that transformers chooses; without effect if they are null, 0 or empty, or 1 in NEUTRAL_AT_ONE.
UNSUPPORTED = """typical_p top_h epsilon_cutoff eta_cutoff encoder_repetition_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids sequence_bias suppress_tokens begin_suppress_tokens min_length min_new_tokens
    forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty guidance_scale watermarking_config token_healing
    penalty_alpha num_beams num_beam_groups num_return_sequences""".split()
NEUTRAL_AT_ONE = {
    "typical_p", "encoder_repetition_penalty", "guidance_scale", "num_beams", "num_beam_groups", "num_return_sequences",
}  # fmt: skip
LOG = logging.getLogger(__name__)


def read_generation_config(folder: Path) -> Fields:
    """Returns the fields of a checkpoint's generation_config.json, none if it has no such file; InputError if it is damaged."""
    file = folder / NAME
    return Fields(huggingface.read_json(file) if os.path.lexists(file) else {}, NAME)  # a broken link is an error


def end_tokens(folder: Path) -> tuple[int, ...]:
    """Returns the eos token ids of generation_config.json; the log tells of sampling in the file."""
    fields = read_generation_config(folder)
    names = [name for name in ("do_sample", *SUPPORTED) if fields.raw.get(name) is not None] + _unsupported(fields)
    if names:
        given = ", ".join(f"{name}={quoted(fields.raw[name])}" for name in names)
        LOG.info("%s has %s, which is ignored unless --sampling model asks for it", NAME, given)
    return fields.token_ids("eos_token_id")


def proposed_sampling(folder: Path) -> dict[str, Any]:
    """Returns the sampling options of generation_config.json, whose values are not checked yet.

    As in transformers, answers are greedy unless `do_sample` is true, and the temperature is then 1 if the file has none. Other
    options that the file leaves out are off, top_k too. A warning names fields that are not supported.
    """
    fields = read_generation_config(folder)
    if not os.path.lexists(folder / NAME):
        LOG.warning("%s has no %s: no sampling options are read from it", folder, NAME)
        return {}
    if names := _unsupported(fields):
        LOG.warning("%s: %s not supported: no effect", NAME, ", ".join(names) + (" is" if len(names) == 1 else " are"))
    samples = fields.take("do_sample", bool, default=False)
    given = {name: fields.raw[name] for name in SUPPORTED if fields.raw.get(name) is not None}
    return {"temperature": 1.0} | given if samples else given | {"temperature": 0.0}


def _unsupported(fields: Fields) -> list[str]:
    """Returns the names of the fields that would change transformers' choice of tokens and are not supported."""
    values = ((name, fields.raw.get(name)) for name in UNSUPPORTED)
    return [name for name, value in values if value and not (name in NEUTRAL_AT_ONE and value == 1)]
