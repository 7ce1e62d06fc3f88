"""The models that `bench.needle.train` can train: the bundled one and a panel of others.

What holds on one small model need not hold on another, so defaults are chosen on all. The panel differs in architecture,
in heads, and in how it was trained.
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
# Nothing longer than 640 tokens, and no text that counts more than once: its heads were never pressed to be sharp in a crowd.
UNCROWDED = (
    Stage(length=160, steps=900, batch=32, keys=2, copying=0.5, skip=False),
    Stage(length=320, steps=600, batch=20, keys=4, copying=0.1),
    Stage(length=640, steps=400, batch=10, keys=8),
)
# Thin heads are slow to find keys by their names. Where half of a text is keys and questions, they learn it in 150 steps.
THIN = (
    stages.STAGES[0],
    Stage(length=320, steps=240, batch=20, keys=8, skip=False),
    Stage(length=320, steps=500, batch=20, keys=6, copying=0.1, crowd=16),
    Stage(length=640, steps=500, batch=10, keys=8, crowd=32),
)
SEVERAL_KEYS = stages.STAGES[:3]  # what several keys in a long text need; several values and hops were not trained


@dataclass(frozen=True)
class Member:
    """A model to train.

    Attributes:
        model_type: of its config.json.
        shape: fields of its config.json beside COMMON.
        stages: the curriculum.
        by_adamw: parts of names of matrices that AdamW trains, as it does those of most published models, not Muon.
        gain: what the weights of the norms of queries and keys begin with.
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
    "adamw": Member("llama", SHORT_ROPE, UNCROWDED, by_adamw=("q_proj", "k_proj")),  # keys whose channels go together
    # With a gain of 1 no product of a query and a key is above 5.7, and no head is sharp; so few channels turn slowly with 1e6.
    "qwen3": Member(
        "qwen3", _shape(8, 192, 384, 8, 2, 32, rope_parameters=dict(rope_type="default", rope_theta=1e5)), THIN, gain=2.0
    ),
    "mha": Member("llama", _shape(3, 256, 512, 4, 4, 128), SEVERAL_KEYS),
}
