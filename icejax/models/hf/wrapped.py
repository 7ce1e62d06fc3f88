"""Models with images or sound, of which only the text model is read; the family registry calls `text_of`."""

from __future__ import annotations

import re
from typing import Any

from icejax.models.hf.fields import Fields

TOWERS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector|embed_vision|audio_tower|embed_audio)\..+")
# Prefixes of parameter names, ours and the checkpoint's: published ones, transformers 5's, and a text model saved alone.
FORMS = (
    (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    (("model.", "model.language_model."),),
    (),
)


def text_of(raw: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Returns the raw config of the text model; other outer fields are about images, sound or training.

    Both levels may hold `tie_word_embeddings`. As in transformers, the outer value takes precedence and the default is true; a
    checkpoint with an output head of its own is untied nevertheless. The end tokens of both levels are joined, because
    transformers writes its default into the inner one.

    Args:
        model_type: type of the text model if its config has none.

    Raises:
        InputError: there is no `text_config`, or a field has the wrong type.
    """
    fields = Fields(raw)
    text = fields.take("text_config", dict)
    tied = fields.take("tie_word_embeddings", bool, default=Fields(text).take("tie_word_embeddings", bool, default=True))
    outer = {name: raw.get(name) for name in ("dtype", "torch_dtype") if text.get(name) is None}
    ends = {"eos_token_id": [*dict.fromkeys((*fields.token_ids("eos_token_id"), *Fields(text).token_ids("eos_token_id")))]}
    return {"model_type": model_type, **text, **outer, **ends, "tie_word_embeddings": tied}
