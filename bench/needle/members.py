"""The models that `bench.needle.train` can train: the bundled one, and a panel of others.

A result on one small model need not hold on another, so the cache's defaults are chosen on all of them. The panel's models
differ in architecture, in heads and in training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.needle import stages, task
from bench.needle.stages import Stage

COMMON = dict(
    vocab_size=task.EOS + 1,
    max_position_embeddings=stages.MAX_POSITION,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=task.EOS,
    pad_token_id=task.EOS,
    rms_norm_eps=1e-5,
)
# At most 640 tokens and no crowding, so heads are never trained to be sharp among many keys.
UNCROWDED = (
    Stage(length=160, steps=900, batch=32, keys=2, copying=0.5, skip=False),
    Stage(length=320, steps=600, batch=20, keys=4, copying=0.1),
    Stage(length=640, steps=400, batch=10, keys=8),
)
# Small heads learn slowly to find keys by names; with keys and questions in half of a text they learn it in 150 steps.
THIN = (
    stages.STAGES[0],
    Stage(length=320, steps=240, batch=20, keys=8, skip=False),
    Stage(length=320, steps=500, batch=20, keys=6, copying=0.1, crowd=16),
    Stage(length=640, steps=500, batch=10, keys=8, crowd=32),
)
SEVERAL_KEYS = stages.STAGES[:3]  # enough for several keys in a long text; neither several values nor hops


@dataclass(frozen=True)
class Member:
    """A model to train.

    Attributes:
        model_type: `model_type` of its config.json.
        shape: fields of its config.json besides COMMON.
        stages: the curriculum.
        by_adamw: matrices whose names contain one of these are trained by AdamW, as in most published models, not by Muon.
        gain: initial weights of the norms of queries and keys.
    """

    model_type: str
    shape: dict[str, Any]
    stages: tuple[Stage, ...] = stages.STAGES
    by_adamw: tuple[str, ...] = ()
    gain: float = 1.0

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return COMMON | self.shape


def _shape(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, size: int, **changes: Any) -> dict[str, Any]:
    sizes = dict(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner)
    return sizes | dict(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=size) | changes


LLAMA = _shape(4, 256, 640, 4, 2, 64)
SHORT_ROPE = LLAMA | dict(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
MEMBERS = {
    "bundled": Member("llama", LLAMA),
    "uncrowded": Member("llama", SHORT_ROPE, UNCROWDED),
    "adamw": Member("llama", SHORT_ROPE, UNCROWDED, by_adamw=("q_proj", "k_proj")),  # gives keys whose channels are correlated
    # With a gain of 1 no product of query and key is above 5.7, so no head is sharp; theta 1e6 is too slow for so few channels.
    "qwen3": Member(
        "qwen3", _shape(8, 192, 384, 8, 2, 32, rope_parameters=dict(rope_type="default", rope_theta=1e5)), THIN, gain=2.0
    ),
    "mha": Member("llama", _shape(3, 256, 512, 4, 4, 128), SEVERAL_KEYS),
}
