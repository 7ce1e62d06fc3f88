"""A model on several devices equals the model on one: logits, text and counters; what cannot run there is refused.

The runs are in a process of their own, which has eight CPU devices (`tests.helpers.on_devices`).
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import icejax
from icejax.checkpoint.load import read_config
from icejax.checks.errors import InputError
from icejax.engine.layout import make_layout
from icejax.models import sharding
from icejax.ops.quantized.products import Grouped
from icejax.runtime import mesh
from tests import tolerances
from tests.helpers.on_devices import CASES, LLAMA

# Sums over devices round otherwise; a code of 4 bits may then be another one.
TOLERANCE = dict.fromkeys(CASES, tolerances.LOGITS) | {"coded": tolerances.CODES}
OF_CACHE = {"append", "select", "fetch", "attend", "pack", "evict"}  # named scopes of caches


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_several_devices_decode_as_one(name):
    command = [sys.executable, "-m", "tests.helpers.on_devices", name]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    raw, cache, _, devices = CASES[name]
    assert result["same_answers"] and result["same_tokens"] and result["error"] < TOLERANCE[name]
    # What is fetched is rounded up to whole slots on each device, in each layer.
    attended, fetched, needed, *others = result["counts"]
    most = devices * raw["num_hidden_layers"]
    assert (attended, others) == (0, [0] * len(others)) and max(fetched, needed) <= most
    assert (result["attended"] > 0) == (cache in ("clustered", "coded"))
    assert result["in_place"]
    sums = result["collectives"]
    counts = cache in ("clustered", "coded")
    assert len(sums) == 2 * raw["num_hidden_layers"] + counts
    assert all(name.endswith("total/psum") and not OF_CACHE & set(name.split("/")) for name in sums)


def config(tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    return read_config(tmp_path)


@pytest.mark.parametrize(("devices", "prompt", "room"), [(4, 300_000, 1024), (8, 20_000, 2048), (8, 300_000, 4096)])
def test_the_values_of_one_kv_head_divide_into_more_parts(tmp_path, devices, prompt, room):
    """Behind a long prompt; XLA:GPU would copy them in every step. The sizes of a session are those of every mesh."""
    model, sizes = config(tmp_path, max_position_embeddings=2**20), dict(prompt_tokens=prompt, new_tokens=64, platform="gpu")
    layout = functools.partial(make_layout, model, "bfloat16", icejax.Full(), batch_size=1, **sizes)
    assert layout(mesh=mesh.Mesh(devices)).spec.new_capacity == room
    assert layout(extends=True).spec.new_capacity == 1024


def test_weights_are_cut_by_heads_and_inner_channels():
    cuts = {
        "model.layers.0.self_attn.q_proj.weight": mesh.cut(0),
        "model.layers.0.self_attn.k_proj.bias": mesh.cut(0),
        "model.layers.0.self_attn.v_proj.weight": mesh.cut(0),
        "model.layers.0.self_attn.o_proj.weight": mesh.cut(1),
        "model.layers.0.self_attn.o_proj.bias": mesh.WHOLE,
        "model.layers.0.self_attn.q_norm.weight": mesh.WHOLE,
        "model.layers.0.self_attn.sinks": mesh.cut(0),
        "model.layers.0.mlp.gate_proj.weight": mesh.cut(0),
        "model.layers.0.mlp.down_proj.weight": mesh.cut(1),
        "model.layers.0.mlp.experts.up_proj.weight": mesh.cut(1),
        "model.layers.0.mlp.experts.down_proj.weight": mesh.cut(2),
        "model.layers.0.mlp.gate.weight": mesh.WHOLE,
        "model.embed_tokens.weight": mesh.WHOLE,
        "lm_head.weight": mesh.WHOLE,
        "layer_scalar": mesh.WHOLE,
    }
    assert {key: sharding.weight_cut(key) for key in cuts} == cuts


def test_codes_are_cut_with_their_scales():
    by_row = Grouped(np.zeros((8, 4, 16), np.int8), np.zeros((8, 4), np.float32), np.zeros((8, 4), np.int8), by_row=True)
    one_scale = Grouped(np.zeros((1, 8, 64), np.int8), np.zeros((1, 8), np.float32), None)
    q, o, embedding = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.o_proj.weight", "embed_tokens.weight"
    assert sharding.weight_cuts(q, by_row) == Grouped(*(mesh.cut(0),) * 3, by_row=True)
    assert sharding.weight_cuts(o, by_row) == Grouped(*(mesh.cut(1),) * 3, by_row=True)
    assert sharding.weight_cuts(q, one_scale) == Grouped(mesh.cut(1), mesh.cut(1), None)
    assert sharding.weight_cuts(o, one_scale) == Grouped(mesh.cut(2), mesh.WHOLE, None)
    assert sharding.weight_cuts(embedding, by_row) == Grouped(*(mesh.WHOLE,) * 3, by_row=True)
    with pytest.raises(InputError) as error:
        sharding.put(o, by_row, mesh.Mesh(3))
    assert str(error.value) == f"mesh heads=3 does not divide the 4 groups of columns of {o}: use fewer devices"


def test_cuts_are_where_shares_differ():
    wholes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((2, 8, 5), (16, 3), (2,))]
    shares = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((2, 2, 5), (4, 3), (2,))]
    assert mesh.cuts_between(wholes, shares) == [mesh.cut(1), mesh.cut(0), mesh.WHOLE]


def test_numbers_that_do_not_divide_are_refused_by_name(tmp_path):
    sharding.check_mesh(config(tmp_path), mesh.Mesh(4))
    with pytest.raises(InputError) as error:
        sharding.check_mesh(config(tmp_path, num_key_value_heads=16, intermediate_size=40), mesh.Mesh(16))
    assert str(error.value) == (
        "mesh heads=16 does not divide the model's 16 KV heads and its MLPs' 40 channels: N must be one of 1, 2, 4, 8"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("heads=two", "mesh must be heads=N, for N devices that share the KV heads, got 'heads=two'"),
        ("tokens=2", "mesh must be heads=N, for N devices that share the KV heads, got 'tokens=2'"),
        ("heads=0", "mesh heads must be at least 1, got 0"),
        (
            "heads=3",
            "mesh heads=3 needs 3 devices and JAX finds 1: set XLA_FLAGS=--xla_force_host_platform_device_count=3",
        ),
    ],
)
def test_a_mesh_that_is_not_there_is_refused(given, message):
    with pytest.raises(InputError) as error:
        icejax.load(mesh=given)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        (dict(latent=object()), "latent attention"),
        (dict(qk_norm="all"), "norms over all heads"),
    ],
)
def test_models_that_are_not_cut_are_refused(tmp_path, changes, kind):
    model = dataclasses.replace(config(tmp_path), **changes)
    with pytest.raises(InputError) as error:
        sharding.check_mesh(model, mesh.Mesh(2))
    assert str(error.value) == f"a model with {kind}, as this llama, runs on one device: leave mesh out"


def test_what_runs_on_one_device_is_refused(bundled):
    model, tokenizer = bundled
    refused = {
        "a session": lambda: icejax.Session(model, tokenizer),
        "an engine with prefix_dir": lambda: icejax.Engine(model, tokenizer, prefix_dir="prefixes"),
        "the cache quest": lambda: icejax.generate(model, tokenizer, "a", cache=icejax.make_policy("quest", {})),
        "a prompt with several answers": lambda: icejax.generate(model, tokenizer, "a", n=2, cache=icejax.Full()),
    }
    model.mesh = mesh.Mesh(2)
    try:
        for what, call in refused.items():
            with pytest.raises(InputError) as error:
                call()
            assert str(error.value) == f"{what} runs on one device: leave mesh out"
    finally:
        model.mesh = None
