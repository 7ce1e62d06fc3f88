"""Decodes greedily on one device and on several, in a process with eight CPU devices: ``python -m tests.helpers.on_devices``.

The arguments are cases (`CASES`); for each a JSON line says how the runs compare. Tests start it, because their own process has
one device.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import numpy as np
from safetensors.numpy import save_file

from icejax.cache.options import make_policy
from icejax.checkpoint.load import abstract, load_model, read_config
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.prefill import prefill
from tests.helpers.run import plan_for

LLAMA = dict(
    model_type="llama",
    vocab_size=199,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position_embeddings=4096,
    attention_bias=True,
    tie_word_embeddings=False,
)
GEMMA = LLAMA | dict(
    model_type="gemma2",
    hidden_activation="gelu_pytorch_tanh",
    sliding_window=32,
    query_pre_attn_scalar=16,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    tie_word_embeddings=True,
    attention_bias=False,
)
# The model, the cache, its options, and the number of devices.
CASES = {
    "full-2": (LLAMA, "full", {}, 2),
    "full-4": (LLAMA, "full", {}, 4),
    "full-8": (LLAMA, "full", {}, 8),
    "sliding": (GEMMA, "full", {}, 4),
    "clustered": (LLAMA, "clustered", dict(budget=64, compact_every=32), 4),
    "coded": (LLAMA, "coded", dict(budget=64), 2),
    "snapkv": (LLAMA, "snapkv", dict(budget=64), 8),
}
COLLECTIVE = r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-[a-z]+|ragged-all-to-all)(-start)?\("
LENGTHS, STEPS = (150, 77), 40  # of the prompts, and steps: two pages become full, and one round is compacted


def checkpoint(raw: dict, folder: Path) -> Path:
    """Writes a checkpoint of a config with random weights of standard deviation fan_in^-1/2, and random biases and norms."""
    (folder / "config.json").write_text(json.dumps(raw))
    rng, tensors = np.random.default_rng(0), {}
    for key, shape in abstract(read_config(folder), "float32")[1].items():
        scale = shape.shape[-1] ** -0.5 if len(shape.shape) > 1 else 0.1
        centre = 1.0 if key.endswith("norm.weight") and raw["model_type"] == "llama" else 0.0
        tensors[key] = (centre + scale * rng.standard_normal(shape.shape)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def addresses(pool) -> list[int]:
    """Returns where the shards of a pool are."""
    return [shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(pool) for shard in x.addressable_shards]


def decode(model, policy) -> dict:
    """Returns the logits and counters of every step, whether the pool stayed in its place, and the step's collectives."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 199, length).tolist() for length in LENGTHS]
    plan = plan_for(model, policy, prompts, STEPS)
    state, step, pool = prefill(model, prompts, plan)
    decoding, steps, places = DecodePrograms(model, plan), [step], addresses(pool)
    collectives = []
    if model.mesh is not None:
        hlo = decoding.programs.program.lower(decoding.programs.leaves, state, pool).compile().as_text()
        lines = [line for line in hlo.splitlines() if re.search(COLLECTIVE, line)]
        collectives = [re.search(r'op_name="([^"]*)"', line)[1] for line in lines]
    for _ in range(STEPS - 1):
        state, step, pool = decoding.step(state, pool)
        steps.append(step)
    return dict(
        logits=np.stack([np.asarray(x.logits) for x in steps]),
        counters=np.stack([np.asarray(x.counters) for x in steps]),
        in_place=addresses(pool) == places,
        collectives=collectives,
    )


def compared(raw: dict, cache: str, options: dict, devices: int) -> dict:
    """Returns how a model on several devices compares with the model on one."""
    with tempfile.TemporaryDirectory() as folder:
        path, policy = checkpoint(raw, Path(folder)), make_policy(cache, options)
        one, several = (decode(load_model(path, mesh=mesh), policy) for mesh in (None, devices))
    difference = np.abs(several["counters"] - one["counters"])
    return dict(
        error=float(np.abs(several["logits"] - one["logits"]).max()),
        same_tokens=not difference[:, 0].any(),
        counts=difference[:, 1:].max((0, 2)).tolist(),
        attended=int(one["counters"][:, 1].sum()),
        in_place=several["in_place"],
        collectives=several["collectives"],
    )


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    for name in sys.argv[1:]:
        print(json.dumps(dict(case=name) | compared(*CASES[name])), flush=True)
