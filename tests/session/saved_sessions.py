"""One small saved session per cache policy, and the script that writes them: python -m tests.session.saved_sessions.

The script saves a session for each policy that the archive lacks, and leaves the others as an earlier version saved them.
Delete `saved_sessions.tar.xz` first only when the format of session folders changes. numpy draws the weights, so they are the
same everywhere.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from icejax.cache.protocol import CachePolicy
from icejax.models.decoder import CausalLM
from icejax.models.registry import family
from icejax.session.session import Session
from tests.helpers.letters import Letters
from tests.helpers.policies import POLICIES

ARCHIVE = Path(__file__).with_name("saved_sessions.tar.xz")
REFUSED = "refused"  # folder of sessions of earlier versions that this one refuses, by policy
ANSWERS = "answers.json"  # token ids of the answer to QUESTION, by session name
CONFIG = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "max_position_embeddings": 512, "rope_theta": 1e4, "tie_word_embeddings": False,
}  # fmt: skip
DOCUMENT = "".join(chr(97 + i) for i in np.random.default_rng(0).integers(0, 26, 120))
QUESTION, NEW_TOKENS = "xyzabc", 8


def model() -> CausalLM:
    """Returns a Llama of two layers with weights of standard deviation fan_in^-1/2."""
    config, rng = family(CONFIG).read_config(CONFIG), np.random.default_rng(0)
    graph, state = nnx.split(nnx.eval_shape(lambda: CausalLM(config, dtype="float32")))

    def draw(x: jax.ShapeDtypeStruct) -> jax.Array:
        if len(x.shape) == 1:
            return jnp.ones(x.shape, x.dtype)
        return jnp.asarray(rng.standard_normal(x.shape) * x.shape[-2] ** -0.5, x.dtype)

    return nnx.merge(graph, jax.tree.map(draw, state))


def policies() -> dict[str, CachePolicy]:
    return {row.name: row.small for row in POLICIES}


def answer(session: Session) -> list[int]:
    return [int(token) for token in session.ask(QUESTION, max_new_tokens=NEW_TOKENS).token_ids]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, answers = Path(name), {}
        if ARCHIVE.exists():
            with tarfile.open(ARCHIVE) as archive:
                archive.extractall(folder, filter="data")
            answers = json.loads((folder / ANSWERS).read_text())
        for policy_name, policy in policies().items():
            if policy_name not in answers:
                session = Session(model(), Letters(), cache=policy, context_length=400)
                session.ask(DOCUMENT, max_new_tokens=24)  # beyond a page: the window was flushed
                session.save(folder / policy_name)
                answers[policy_name] = answer(session)
        (folder / ANSWERS).write_text(json.dumps(answers))
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            for path in sorted(folder.iterdir()):
                archive.add(path, path.name)


if __name__ == "__main__":
    main()
