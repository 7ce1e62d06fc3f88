"""The field `explain` of chats and completions, and what an answer looks at, which a choice then tells."""

from __future__ import annotations

from typing import Any

import numpy as np

from icejax.engine.response import GenerationResponse
from icejax.serving.errors import ApiError
from icejax.serving.schemas import AnswerFields

DIGITS = 5  # after the point, of a weight


def explains(fields: AnswerFields) -> bool:
    """Says whether the answer tells what it looks at; ApiError 400 for several answers, each of which would read the prompt."""
    if fields.explain and (fields.n or 1) > 1:
        raise ApiError(400, f"explain is of one answer, and n is {fields.n}: leave n out", param="explain")
    return bool(fields.explain)


def attention_of(response: GenerationResponse) -> dict[str, Any]:
    """Returns the field `attention` of a choice; no field if the piece has none."""
    if (picture := response.attention) is None:
        return {}
    weights = np.round(picture.weights.astype(np.float64), DIGITS).tolist()
    return dict(attention=dict(prompt_tokens=picture.tokens, steps=picture.steps, layers=picture.layers, weights=weights))
