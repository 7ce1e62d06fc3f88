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
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

import icejax
from icejax.cache.options import make_policy
from icejax.checkpoint import boxes
from icejax.checkpoint.convert import hf_to_orbax
from icejax.checkpoint.load import abstract, load_model, read_config
from icejax.checkpoint.tensor_mapping import tensor_mappings
from icejax.engine import plan as planning
from icejax.engine.decode.step import DecodePrograms, StepParts, WholeStep
from icejax.engine.layers import embed
from icejax.engine.prefill import _prefill_layer, lengths_of, pool_for, prefill
from icejax.engine.sampling import Sampling
from icejax.engine.units.job import PrefillJob
from icejax.engine.units.sizes import UnitSizes
from icejax.models.registry import family
from icejax.runtime import devices
from icejax.runtime.mesh import read_mesh
from tests.helpers.checkpoints import same_arrays
from tests.helpers.letters import Letters
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
MISTRAL = {key: value for key, value in LLAMA.items() if key != "attention_bias"} | dict(
    model_type="mistral", sliding_window=32, vocab_size=200, tie_word_embeddings=True
)
EXPERTS = {key: value for key, value in LLAMA.items() if key != "attention_bias"} | dict(
    model_type="qwen3_moe",
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[1],
)
PLAIN = {key: value for key, value in LLAMA.items() if key not in ("attention_bias", "tie_word_embeddings")} | dict(
    sliding_window=32, layer_types=["sliding_attention", "full_attention"]
)
GPT_OSS = PLAIN | dict(model_type="gpt_oss", num_local_experts=8, num_experts_per_tok=2)
GEMMA4 = PLAIN | dict(
    model_type="gemma4_text",
    global_head_dim=32,
    hidden_size_per_layer_input=0,
    enable_moe_block=True,
    num_experts=8,
    top_k_experts=2,
    moe_intermediate_size=16,
)
LATENT = {key: value for key, value in LLAMA.items() if key != "attention_bias"} | dict(
    model_type="deepseek_v2",
    num_attention_heads=8,
    num_key_value_heads=8,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_shared_experts=1,
)
ONE_LAYER = dict(num_hidden_layers=1)
FEW_KV_HEADS = LLAMA | dict(num_key_value_heads=2)
MIXTURE, MIXTURE_LATENT = EXPERTS | ONE_LAYER | dict(mlp_only_layers=[]), LATENT | ONE_LAYER
NORMS = {key: value for key, value in LLAMA.items() if key != "head_dim"} | dict(
    model_type="olmo2", hidden_size=64, num_attention_heads=8, attention_bias=False
)
# The model, the cache, its options, and the number of devices or the mesh.
CASES = {
    "full-2": (LLAMA, "full", {}, 2),
    "full-4": (LLAMA, "full", {}, 4),
    "full-8": (LLAMA, "full", {}, 8),
    "sliding": (MISTRAL, "full", {}, 4),
    "clustered": (LLAMA, "clustered", dict(budget=64, compact_every=32), 4),
    "coded": (LLAMA | ONE_LAYER, "coded", dict(budget=64), 2),
    "snapkv": (LLAMA, "snapkv", dict(budget=64), 8),
    "experts": (EXPERTS, "full", {}, 8),
    "biased experts": (GPT_OSS, "full", {}, 4),
    "experts beside": (GEMMA4, "full", {}, 4),
    "int4": (LLAMA, "full", {}, 2),
    "latent": (LATENT, "full", {}, 8),
    "norms": (NORMS, "quest", dict(budget=64), 4),
    "experts clustered": (MIXTURE, "clustered", dict(budget=64, compact_every=32), 4),
    "experts coded": (MIXTURE, "coded", dict(budget=64), 2),
    "experts snapkv": (MIXTURE, "snapkv", dict(budget=64), 8),
    # Each device of a latent layer chooses pages for its own query heads, so that the budget has room for all tokens.
    "latent clustered": (MIXTURE_LATENT, "clustered", dict(budget=1024, compact_every=32), 4),
    "latent coded": (MIXTURE_LATENT, "coded", dict(budget=1024), 2),
    "latent keydiff": (MIXTURE_LATENT, "keydiff", dict(budget=64), 8),
    # So does each of the devices that have copies of a KV head.
    "tokens full": (FEW_KV_HEADS, "full", {}, "heads=2,tokens=4"),
    "tokens clustered": (FEW_KV_HEADS, "clustered", dict(budget=1024, compact_every=32), "heads=2,tokens=2"),
    "tokens coded": (FEW_KV_HEADS | ONE_LAYER, "coded", dict(budget=1024), "heads=2,tokens=2"),
    "tokens keydiff": (LLAMA | dict(num_key_value_heads=1), "keydiff", dict(budget=64), "heads=1,tokens=8"),
    "tokens int8": (FEW_KV_HEADS, "full", {}, "heads=2,tokens=2"),
    "tokens norms": (NORMS | dict(num_key_value_heads=2), "clustered", dict(budget=1024), "heads=2,tokens=4"),
}
BY_LAYERS = ("norms", "experts clustered", "latent keydiff")  # cases whose step is a program per layer, as of a larger model
WEIGHTS = {"int4": dict(quantize="int4"), "tokens int8": dict(quantize="int8")}  # options of loading
# Cases whose model on several devices is read of an icejax folder too, which they have written; how its matrices are rounded.
CONVERTED = {"full-8": None, "int4": "int4"}
IN_UNITS = ("clustered", "sliding", "tokens full")  # cases whose first prompt is also prefilled in units
COLLECTIVE = r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-[a-z]+|ragged-all-to-all)(-start)?\("
LEAST_LAYERS = planning.LEAST_LAYERS
LENGTHS, STEPS = (150, 77), 40  # of the prompts, and steps: two pages become full, and one round is compacted


def checkpoint(raw: dict, folder: Path) -> Path:
    """Writes a checkpoint of a config with random weights of standard deviation fan_in^-1/2, and random biases and norms."""
    (folder / "config.json").write_text(json.dumps(raw))
    rng, tensors, form = np.random.default_rng(0), {}, family(raw)
    shapes = {key: parameter.shape for key, parameter in abstract(read_config(folder), "float32")[1].items()}
    for mapping in tensor_mappings(shapes, form).values():
        for key in (key for key in mapping.keys if key not in tensors):
            scale = mapping.columns**-0.5 if len(mapping.shape) > 1 else 0.1
            centre = 1.0 if "norm" in key else 0.0
            tensors[key] = (centre + scale * rng.standard_normal(mapping.shape)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def addresses(pool) -> list[int]:
    """Returns where the shards of a pool are."""
    return [shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(pool) for shard in x.addressable_shards]


def prompts_of(lengths) -> list[list[int]]:
    """Returns random prompts."""
    rng = np.random.default_rng(1)
    return [rng.integers(0, 199, length).tolist() for length in lengths]


def first_logits_in_units(model, policy) -> list:
    """Returns the logits behind the first prompt, prefilled in units, and those of the first step behind it."""
    [prompt] = prompts_of(LENGTHS[:1])
    plan = plan_for(model, policy, [prompt], STEPS)
    pool, table = pool_for([len(prompt)], plan, None)
    job = PrefillJob(model, prompt, plan, table, sampling=Sampling(), draw=(0, 0), sizes=UnitSizes(64, 32))
    while not job.done:
        pool = job.advance(pool)
    state, first = job.result()
    return [first.logits, DecodePrograms(model, plan).step(state, pool)[1].logits]


def answers(model) -> list[list[int]]:
    """Returns the answers of an engine with two places to three prompts."""
    sizes = dict(batch_size=2, context_length=256, max_new_tokens=16)
    with icejax.Engine(model, Letters(), cache=icejax.Full(), **sizes) as engine:
        handles = [
            engine.submit(prompt, max_new_tokens=n) for prompt, n in zip(prompts_of((40, 90, 20)), (5, 16, 9), strict=True)
        ]
        return [list(handle.result().token_ids) for handle in handles]


def decode(model, policy) -> dict:
    """Returns the logits and counters of every step, whether the pool stayed in its place, and the step's collectives."""
    prompts = prompts_of(LENGTHS)
    plan = plan_for(model, policy, prompts, STEPS)
    state, step, pool = prefill(model, prompts, plan)
    decoding, steps, places = DecodePrograms(model, plan), [step], addresses(pool)
    collectives = [] if model.mesh is None else collectives_of(decoding.programs, state, pool)
    for _ in range(STEPS - 1):
        state, step, pool = decoding.step(state, pool)
        steps.append(step)
    return dict(
        logits=np.stack([np.asarray(x.logits) for x in steps]),
        counters=np.stack([np.asarray(x.counters) for x in steps]),
        in_place=addresses(pool) == places,
        collectives=collectives,
    )


def prefill_program(model) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Compiles a layer's prefill of 8,192 tokens; returns the scopes of its collectives by opcode, and where tokens are together.

    `stream` is how many times fewer hidden states a device gets and returns than all tokens have; `most` is the largest number of
    tokens whose hidden states are in one array of the program.
    """
    tokens, hidden, mesh = 8192, model.config.hidden_size, model.mesh
    plan = planning.make_plan(model, icejax.Full(), batch_size=1, prompt_tokens=tokens, new_tokens=1)
    x = embed(model, jax.numpy.zeros((1, tokens), jax.numpy.int32))
    arrays, sizes = (model.model.layers[0], x, lengths_of([[0] * 9])), dict(policy=plan.policies[0], spec=plan.spec)
    compiled = _prefill_layer.lower(*arrays, None, **sizes).compile()
    scopes: dict[str, list[str]] = {}
    for line in compiled.as_text().splitlines():
        if found := re.search(COLLECTIVE, line):
            scopes.setdefault(found[1], []).append("/".join(re.search(r'op_name="([^"]*)"', line)[1].split("/")[-2:]))
    shapes = (tuple(map(int, text.split(","))) for text in re.findall(r"f32\[([\d,]+)\]", compiled.as_text()))
    most = max(int(np.prod(shape)) for shape in shapes if shape[-1] in (hidden, hidden * mesh.size) and len(shape) > 2)
    [result, *_] = compiled.out_info
    parts = [tokens * hidden // int(np.prod(array.sharding.shard_shape(array.shape))) for array in (x, result)]
    assert parts[0] == parts[1]
    return scopes, dict(stream=parts[0], most=most // hidden)


def collectives_of(programs: StepParts | WholeStep, state, pool) -> list[str]:
    """Returns the names of the collectives of a step's programs."""
    texts = []

    def recorded(program):
        def run(*arrays):
            texts.append(program.lower(*arrays).compile().as_text())
            return program(*arrays)

        return run

    if isinstance(programs, WholeStep):
        texts.append(programs.program.lower(programs.leaves, state, pool).compile().as_text())
    else:
        layers = [layer._replace(program=recorded(layer.program)) for layer in programs.layers]
        ends = dict(begin=recorded(programs.begin), finish=recorded(programs.finish))
        programs._replace(layers=layers, **ends).run(jax.tree.map(jnp.copy, state), pool)
    lines = [line for text in texts for line in text.splitlines() if re.search(COLLECTIVE, line)]
    return [re.search(r'op_name="([^"]*)"', line)[1] for line in lines]


def load_counting(path: Path, **options) -> tuple:
    """Returns a loaded model, and the bytes that were read of its checkpoint."""
    read, sizes = boxes.read, []
    boxes.read = lambda *arguments: (array := read(*arguments), sizes.append(array.nbytes))[0]
    try:
        return load_model(path, **options), sum(sizes)
    finally:
        boxes.read = read


def compared(name: str, over: int | None = None) -> dict:
    """Returns how a model on several devices compares with the model on one.

    Args:
        over: number of devices of several processes, where no prompt is prefilled in units; None: one process has the case's.
    """
    (raw, cache, options, count), in_units, same_weights = CASES[name], [], True
    planning.LEAST_LAYERS = 1 if name in BY_LAYERS else LEAST_LAYERS
    meshes, over_devices = (None, over or count), read_mesh(over or count)
    copies = over_devices.size if "kv_lora_rank" in raw else over_devices.tokens
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as parent:
        path, policy = checkpoint(raw, Path(folder)), make_policy(cache, options)
        (one, stored), (several, read) = (load_counting(path, mesh=mesh, **WEIGHTS.get(name, {})) for mesh in meshes)
        if name in CONVERTED and over is None:
            hf_to_orbax(path, Path(parent) / "orbax", quantize=CONVERTED[name], mesh=count)
            of_safetensors, several = several, load_model(Path(parent) / "orbax", mesh=count)
            same_weights = same_arrays(of_safetensors, several)
        models, [vocabulary, *_] = (one, several), several.model.embed_tokens.weight[...].addressable_shards
        one, several = (decode(model, policy) for model in models)
        if name in IN_UNITS and over is None:
            pairs = zip(*(first_logits_in_units(model, policy) for model in models), strict=True)
            in_units = [float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs]
        same_answers = answers(models[0]) == answers(models[1]) if name == "full-4" and over is None else True
    one["counters"][:, 1:4] *= copies  # each of them attends to its own
    difference = np.abs(several["counters"] - one["counters"])
    return dict(
        error=max(float(np.abs(several["logits"] - one["logits"]).max()), *in_units, 0.0),
        same_answers=same_answers,
        same_weights=same_weights,
        same_tokens=not difference[:, 0].any(),
        counts=difference[:, 1:].max((0, 2)).tolist(),
        attended=int(one["counters"][:, 1].sum()),
        in_place=several["in_place"],
        stored=stored,
        read=read,
        vocabulary=len(vocabulary.data),
        collectives=several["collectives"],
        **(dict(prefill=prefill_program(models[1])) if name == "full-8" else {}),
    )


if __name__ == "__main__":
    devices.set_limits()
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    from tests.helpers.kept_on_devices import KEPT, kept

    for name in sys.argv[1:]:
        print(json.dumps(dict(case=name) | (kept if name in KEPT else compared)(name)), flush=True)
