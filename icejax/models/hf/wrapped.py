"""Models with images or sound, of which only the text model is read; the family registry calls `text_of`."""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any

from icejax.models.hf.fields import Fields
from icejax.models.hf.hf_config import IRRELEVANT, finish

TOWERS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector|embed_vision|audio_tower|embed_audio)\..+")
# Prefixes of parameter names, ours and the checkpoint's: published ones, transformers 5's, and a text model saved alone.
FORMS = (
    (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    (("model.", "model.language_model."),),
    (),
)
# Fields of a config.json that belong to the towers (vision, audio) only.
GEMMA3 = {"boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image", "vision_config"}
GEMMA4 = {
    "audio_config", "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_id", "eoa_token_index", "eoi_token_id",
    "image_token_id", "video_token_id", "vision_config", "vision_soft_tokens_per_image",
}  # fmt: skip
MISTRAL3 = {
    "image_token_id", "image_token_index", "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size",
    "vision_config", "vision_feature_layer",
}  # fmt: skip


def text_of(raw: dict[str, Any], model_type: str, towers: Set[str]) -> dict[str, Any]:
    """Returns the raw config of the text model; outer fields other than `towers` are refused.

    Both levels may hold `tie_word_embeddings`. As in transformers, the outer value takes precedence and the default is true; a
    checkpoint with an output head of its own is untied nevertheless. The end tokens of both levels are joined, because
    transformers writes its default into the inner one.

    Args:
        model_type: type of the text model if its config has none.
        towers: outer fields that belong to images or sound.

    Raises:
        InputError: there is no `text_config`, or a field is unknown.
    """
    fields = Fields(raw)
    text = fields.take("text_config", dict)
    tied = fields.take("tie_word_embeddings", bool, default=Fields(text).take("tie_word_embeddings", bool, default=True))
    finish(fields, irrelevant=IRRELEVANT | towers)
    outer = {name: raw.get(name) for name in ("dtype", "torch_dtype") if text.get(name) is None}
    ends = {"eos_token_id": [*dict.fromkeys((*fields.token_ids("eos_token_id"), *Fields(text).token_ids("eos_token_id")))]}
    return {"model_type": model_type, **text, **outer, **ends, "tie_word_embeddings": tied}
