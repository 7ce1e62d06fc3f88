"""What an answer looks at, as choices of chats and completions tell it to a client that asked with `explain`."""

from __future__ import annotations

from typing import Any

import numpy as np

from icejax.engine.response import GenerationResponse

DIGITS = 5  # behind the point, of a weight


def attention_of(response: GenerationResponse) -> dict[str, Any]:
    """Returns the field `attention` of a choice; no field if the piece has none."""
    if (picture := response.attention) is None:
        return {}
    weights = np.round(picture.weights.astype(np.float64), DIGITS).tolist()
    return dict(attention=dict(prompt_tokens=picture.tokens, steps=picture.steps, layers=picture.layers, weights=weights))
