"""Models with images or sound, of which the text model alone is read: its config and tensors stand in theirs."""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any

from icejax.models.hf.fields import Fields
from icejax.models.hf.hf_config import IRRELEVANT, finish

TOWERS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector|embed_vision|audio_tower|embed_audio)\..+")
# Parts of parameters' names, ours and theirs: on the hub, in transformers 5, and where the text model alone was written.
FORMS = (
    (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    (("model.", "model.language_model."),),
    (),
)
# Fields of a config.json that are of the towers alone.
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
    """Returns the raw config of the text model, of `model_type` unless it says; other fields than `towers` are refused.

    Both levels may say whether the head is the embedding. As in transformers the outer one counts, and true unless said; a head
    that is stored is one of its own all the same. Both may say what ends a text: transformers writes its default into the inner
    one, so that both count.
    """
    fields = Fields(raw)
    text = fields.take("text_config", dict)
    tied = fields.take("tie_word_embeddings", bool, default=Fields(text).take("tie_word_embeddings", bool, default=True))
    finish(fields, irrelevant=IRRELEVANT | towers)
    outer = {name: raw.get(name) for name in ("dtype", "torch_dtype") if text.get(name) is None}
    ends = {"eos_token_id": [*dict.fromkeys((*fields.token_ids("eos_token_id"), *Fields(text).token_ids("eos_token_id")))]}
    return {"model_type": model_type, **text, **outer, **ends, "tie_word_embeddings": tied}
