"""generation_config.json: which fields are sampling, and which of transformers' fields icejax does not support."""

import inspect
import re

from icejax.checkpoint.generation_config import NEUTRAL_AT_ONE, SUPPORTED, UNSUPPORTED

# Fields that `_get_logits_processor` reads and that do not change which tokens are likely, or that are read elsewhere.
OTHERS = {"_eos_token_tensor", "do_sample", "max_length", "remove_invalid_values", "renormalize_logits", "use_cache"}


def test_every_field_that_transformers_samples_by_is_known():
    from transformers.generation.utils import GenerationMixin

    source = inspect.getsource(GenerationMixin._get_logits_processor)
    fields = set(re.findall(r"generation_config\.(\w+)", source))
    assert {"temperature", "typical_p", "no_repeat_ngram_size"} <= fields
    assert not fields - {*SUPPORTED, *UNSUPPORTED} - OTHERS


def test_fields_that_are_neutral_at_one_are_so_in_transformers():
    from transformers import GenerationConfig

    defaults = GenerationConfig._get_default_generation_params()
    assert {name for name in (*UNSUPPORTED, *SUPPORTED) if defaults.get(name) == 1} - {*SUPPORTED} <= NEUTRAL_AT_ONE
    assert {*NEUTRAL_AT_ONE} <= {*UNSUPPORTED} and not any(defaults.get(name) for name in {*UNSUPPORTED} - NEUTRAL_AT_ONE)
