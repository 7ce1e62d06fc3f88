"""A model on several devices equals the model on one: logits, text and counters; what cannot run there is refused.

The runs are in a process of their own, which has eight CPU devices (`tests.helpers.on_devices`).
"""

import contextlib
import functools
import json
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import icejax
from icejax.checkpoint.load import read_config
from icejax.checks.errors import InputError
from icejax.engine.layout import make_layout
from icejax.models import sharding
from icejax.models.parts.linear import Linear
from icejax.models.parts.vocabulary import Embedding
from icejax.ops.quantized.products import Grouped
from icejax.runtime import mesh
from tests import tolerances
from tests.helpers.kept_on_devices import KEPT
from tests.helpers.on_devices import CASES, GEMMA4, LATENT, LLAMA

# Sums over devices round otherwise; a code of 4 bits may then be another one.
TOLERANCE = dict.fromkeys(CASES, tolerances.LOGITS) | {"coded": tolerances.CODES_ON_DEVICES}
# Models that are run with several caches, each in one process.
TOGETHER = [[name for name in CASES if name.partition(" ")[0] == model] for model in ("experts", "latent", "tokens")]
OF_CACHE = {"append", "select", "fetch", "attend", "pack", "evict"}  # named scopes of caches


def on_devices(*names) -> list[dict]:
    """Returns the results of cases, in a process with eight CPU devices."""
    command = [sys.executable, "-m", "tests.helpers.on_devices", *names]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return list(map(json.loads, done.stdout.splitlines()))


@pytest.mark.slow
@pytest.mark.parametrize("names", [*TOGETHER, *([name] for name in CASES if name not in sum(TOGETHER, []))], ids=lambda x: x[0])
def test_several_devices_decode_as_one(names):
    results = on_devices(*names)
    assert [result["case"] for result in results] == names
    for result in results:
        check(result)


def check(result: dict) -> None:
    """Asserts what a case's result must be."""
    name = result["case"]
    raw, cache, _, given = CASES[name]
    devices = given if isinstance(given, int) else math.prod(map(int, re.findall("[0-9]+", given)))
    assert result["same_answers"] and result["same_weights"] and result["same_tokens"] and result["error"] < TOLERANCE[name]
    # What is fetched is rounded up to whole slots on each device, in each layer.
    attended, fetched, needed, *others = result["counts"]
    most = devices * raw["num_hidden_layers"]
    assert (attended, others) == (0, [0] * len(others)) and max(fetched, needed) <= most
    assert (result["attended"] > 0) == (cache in ("clustered", "coded", "quest"))
    assert result["in_place"]
    sums = result["collectives"]
    counts = cache in ("clustered", "coded", "quest")
    by_layer = 3 if name.endswith("norms") else 2  # XLA joins the sums of both norms, and those of experts and shared experts
    # The embedding and the counters have a sum each; the logits are gathered.
    assert len(sums) == by_layer * raw["num_hidden_layers"] + 1 + counts + 1
    [gathered] = [name for name in sums if not name.endswith("total/psum")]
    assert gathered.endswith("gathered/all_gather")
    assert not any(OF_CACHE & set(name.split("/")) for name in sums)
    if "prefill" in result:
        # In the loops over chunks of 2,048 tokens: gathered before q, k and v and before the MLP, summed behind both halves.
        collectives, hidden = result["prefill"]
        expected = {"all-gather": {"gathered/all_gather"}, "reduce-scatter": {"total/reduce_scatter"}}
        assert {opcode: set(scopes) for opcode, scopes in collectives.items()} == expected
        assert [len(scopes) for scopes in collectives.values()] == [2, 2]
        assert hidden == {"stream": devices, "most": 2048}  # the stream's tokens, and all tokens of one chunk alone
    # Gates and ups whose rows alternate are read for each of the two, and the rows of a KV head for each device that has it.
    assert (result["read"] == result["stored"]) == (name != "biased experts" and isinstance(given, int))
    assert result["vocabulary"] == -(-raw["vocab_size"] // devices)


@pytest.mark.slow
def test_what_is_saved_on_several_devices_goes_on_on_others():
    """Sessions, prefixes on the disk, and rows that are prefilled again."""
    for result in on_devices(*KEPT):
        assert result["same_texts"] and result.get("same_bits", True) and result.get("same_last", True)
        # The second question stores the document's first block, in the folder too, which two later engines read.
        assert result.get("cached") in (None, [[0, 0, 256]] * 2 + [[256] * 3] * 2)


def config(tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    return read_config(tmp_path)


@pytest.mark.parametrize(
    ("devices", "prompt", "room"),
    [(1, 300_000, 1024), (4, 20_000, 1024), (4, 300_000, 4096), (8, 20_000, 2048), (8, 300_000, 4096)],
)
def test_the_values_of_one_kv_head_divide_into_more_parts(tmp_path, devices, prompt, room):
    """Behind a long prompt; XLA:GPU would copy them in every step. The sizes of a session are those of every mesh."""
    model, sizes = config(tmp_path, max_position_embeddings=2**20), dict(prompt_tokens=prompt, new_tokens=64, platform="gpu")
    layout = functools.partial(make_layout, model, "bfloat16", icejax.Full(), batch_size=1, **sizes)
    assert layout(mesh=mesh.Mesh(devices) if devices > 1 else None).spec.new_capacity == room
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
        "model.layers.0.self_attn.q_b_proj.weight": mesh.cut(0),
        "model.layers.0.self_attn.kv_b_proj.weight": mesh.cut(0),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": mesh.WHOLE,
        "model.layers.0.mlp.gate_proj.weight": mesh.cut(0),
        "model.layers.0.mlp.down_proj.weight": mesh.cut(1),
        "model.layers.0.mlp.experts.up_proj.weight": mesh.cut(1),
        "model.layers.0.mlp.experts.down_proj.weight": mesh.cut(2),
        "model.layers.0.mlp.experts.gate_proj.bias": mesh.cut(1),
        "model.layers.0.mlp.experts.down_proj.bias": mesh.WHOLE,
        "model.layers.0.mlp.gate.weight": mesh.WHOLE,
        "model.embed_tokens.weight": mesh.cut(0),
        "lm_head.weight": mesh.cut(0),
        "head": mesh.cut(0),
        "layer_scalar": mesh.WHOLE,
    }
    assert {key: sharding.weight_cut(key) for key in cuts} == cuts


def test_codes_are_cut_with_their_scales():
    by_row = Grouped(np.zeros((8, 4, 16), np.int8), np.zeros((8, 4), np.float32), np.zeros((8, 4), np.int8), by_row=True)
    one_scale = Grouped(np.zeros((1, 8, 64), np.int8), np.zeros((1, 8), np.float32), None)
    q, o, router = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.o_proj.weight", "mlp.gate.weight"
    assert sharding.weight_cuts(q, by_row) == Grouped(*(mesh.cut(0),) * 3, by_row=True)
    assert sharding.weight_cuts(o, by_row) == Grouped(*(mesh.cut(1),) * 3, by_row=True)
    assert sharding.weight_cuts(q, one_scale) == Grouped(mesh.cut(1), mesh.cut(1), None)
    assert sharding.weight_cuts(o, one_scale) == Grouped(mesh.cut(2), mesh.WHOLE, None)
    assert sharding.weight_cuts(o, one_scale, groups=4) == Grouped(mesh.cut(0), mesh.cut(0), None)  # a device has one group
    assert sharding.weight_cuts(router, by_row) == Grouped(*(mesh.WHOLE,) * 3, by_row=True)
    with pytest.raises(InputError) as error:
        sharding.check_groups(o, 4, mesh.Mesh(3))
    assert str(error.value) == f"mesh heads=3 does not divide the 4 groups of columns of {o}: use fewer devices"


def test_a_vocabulary_that_the_devices_do_not_divide_is_filled_with_zeros():
    key, weight = "lm_head.weight", np.arange(1, 15, dtype=np.float32).reshape(7, 2)
    parts = [sharding.box(key, (7, 2), mesh.Mesh(3), device)[0] for device in range(3)]
    assert parts == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert np.array_equal(sharding.share_of(key, weight, mesh.Mesh(3), 2), weight[6:])
    assert np.array_equal(sharding._filled(2, weight[6:], mesh.cut(0)), [[13, 14], [0, 0], [0, 0]])


class OneHead(nnx.Module):
    """A key projection of two KV heads, of which three devices each have a copy."""

    def __init__(self) -> None:
        self.k_proj = Linear(3, 12, bias=True, dtype="float32")
        self.k_proj.weight = nnx.Param(jnp.arange(12.0).reshape(2, 1, 2, 3).repeat(3, 1).reshape(12, 3))
        self.k_proj.bias = nnx.Param(jnp.asarray([0.0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]))


def test_a_kv_head_is_read_for_each_device_that_has_it():
    over = mesh.Mesh(2, 3)
    keys, queries = (
        [sharding.box(f"self_attn.{name}.weight", shape, over, device)[0] for device in range(6)]
        for name, shape in (("k_proj", (4, 3)), ("q_proj", (12, 3)))
    )
    assert keys == [slice(0, 2)] * 3 + [slice(2, 4)] * 3
    assert queries == [slice(start, start + 2) for start in range(0, 12, 2)]
    whole = {key: x.tolist() for key, x in sharding.weights_of(OneHead(), over)}
    assert list(whole.values()) == [[0, 1, 2, 3], np.arange(12).reshape(4, 3).tolist()]  # without copies


def test_the_weight_of_a_norm_over_all_heads_is_that_of_its_own():
    """Devices are simulated by a mapped axis; two have the same three channels of six."""
    x = jnp.arange(6)
    parts = jax.vmap(lambda _: mesh.part(mesh.Mesh(2, 2), x, 3), axis_name=mesh.AXIS)(jnp.zeros(4))
    assert parts.tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    parts = jax.vmap(lambda _: mesh.part(mesh.Mesh(3), x, 2), axis_name=mesh.AXIS)(jnp.zeros(3))
    assert parts.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_vocabulary_in_parts_embeds_and_scores_as_one():
    """Devices are simulated by a mapped axis. The last device has a row of zeros behind the vocabulary of 11."""
    rng, devices = np.random.default_rng(0), mesh.Mesh(4)
    matrix, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((12, 5), (2, 3, 5)))
    tokens = jnp.asarray([[0, 2, 3, 9, 1, 1, 4, 7], [10, 5, 6, 8, 0, 3, 10, 2]], jnp.int32)
    _, tree = jax.tree.flatten(Embedding(12, 5, scale=2.0, dtype="float32", mesh=devices))

    def run(part):
        logits = mesh.gathered(devices, x @ part.T, 11)
        return jax.tree.unflatten(tree, [part])(tokens), logits, mesh.total(devices, mesh.once(devices, x))

    embedded, logits, counted = jax.vmap(run, axis_name=mesh.AXIS)(matrix.reshape(4, 3, 5))
    for device in range(4):
        np.testing.assert_array_equal(embedded[device], 2 * matrix[tokens[:, device::4]])  # its own tokens
        np.testing.assert_allclose(logits[device], x @ matrix[:11].T, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(counted[device], x)


def test_of_a_prompt_each_device_has_the_sums_of_its_own_tokens():
    """Devices are simulated by a mapped axis. One token is whole everywhere, and so are all on a mesh that does not divide 16."""
    x = np.random.default_rng(0).standard_normal((4, 2, 8, 3)).astype(np.float32)
    of_one, whole = x[:, :, :1], x.sum(0)

    def run(x, of_one):
        own = mesh.hidden_total(mesh.Mesh(4), x)
        every = mesh.every_token(own, 8)
        return (
            own,
            every,
            mesh.own_tokens(every, 2),
            mesh.hidden_total(mesh.Mesh(4), of_one),
            mesh.hidden_total(mesh.Mesh(3), x),
        )

    for device, (own, every, again, token, of_three) in enumerate(
        zip(*jax.vmap(run, axis_name=mesh.AXIS)(x, of_one), strict=True)
    ):
        np.testing.assert_allclose(own, whole[:, device::4], rtol=0, atol=tolerances.EXACT)
        np.testing.assert_array_equal(again, own)
        for result, expected in ((every, whole), (token, whole[:, :1]), (of_three, whole)):
            np.testing.assert_allclose(result, expected, rtol=0, atol=tolerances.EXACT)


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
    (tmp_path / "config.json").write_text(json.dumps(LATENT))
    with pytest.raises(InputError) as error:
        sharding.check_mesh(read_config(tmp_path), mesh.Mesh(3))
    assert str(error.value) == (
        "mesh heads=3 does not divide the model's 8 query heads and its MLPs' 16 channels: N must be one of 1, 2, 4, 8"
    )


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({}, (4, 2), "tokens=M is for one KV head to a device, and the model has 8: give heads=8"),
        (
            dict(num_key_value_heads=2),
            (2, 3),
            "does not divide the 8 query heads of a KV head and the MLPs' 64 channels: M must be one of 1, 2, 4, 8",
        ),
        (LATENT, (2, 2), "tokens=M is not for this model, because latent attention has no KV heads: leave tokens out"),
        (
            GEMMA4 | dict(num_global_key_value_heads=4, attention_k_eq_v=True),
            (4, 2),
            "tokens=M is not for this model, because its layers have unlike numbers of KV heads: leave tokens out",
        ),
    ],
)
def test_devices_that_cannot_share_a_kv_head_are_refused(tmp_path, changes, given, message):
    (tmp_path / "config.json").write_text(json.dumps(changes if "model_type" in changes else LLAMA | changes))
    over = mesh.Mesh(*given)
    with pytest.raises(InputError) as error:
        sharding.check_mesh(read_config(tmp_path), over)
    assert str(error.value) == f"mesh {over}" + (" " if message.startswith("does") else ": ") + message


FORMS = "mesh must be heads=N, for N devices that share the KV heads, or heads=N,tokens=M, for M devices to each KV head"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("heads=two", f"{FORMS}, got 'heads=two'"),
        ("tokens=2", f"{FORMS}, got 'tokens=2'"),
        ("heads=2,tokens=", f"{FORMS}, got 'heads=2,tokens='"),
        ("heads=2,tokens=0", "mesh tokens must be at least 1, got 0"),
        (
            "heads=2,tokens=4",
            "mesh heads=2,tokens=4 needs 8 devices and JAX finds 1: set XLA_FLAGS=--xla_force_host_platform_device_count=8",
        ),
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


def test_caches_that_mix_heads_are_refused(bundled, monkeypatch):
    model, tokenizer = bundled
    monkeypatch.setattr(model, "mesh", mesh.Mesh(2))
    for name, options in {"tolerant": {}, "packed": dict(estimate=True), "adakv": {}}.items():
        with pytest.raises(InputError) as error:
            icejax.Session(model, tokenizer, cache=icejax.make_policy(name, options), context_length=500).ask("a")
        assert str(error.value) == f"the cache {name} runs on one device: leave mesh out"


def test_a_latent_cache_that_evicts_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LATENT))
    sizes = dict(batch_size=1, prompt_tokens=100, new_tokens=9, platform="cpu", mesh=mesh.Mesh(2))
    for cache in ("clustered", "keydiff", "streaming", "quest", "snapkv"):
        refused = pytest.raises(InputError) if cache in ("quest", "snapkv") else contextlib.nullcontext()
        with refused as error:
            make_layout(read_config(tmp_path), "float32", icejax.make_policy(cache, {}), **sizes)
        if error is not None:
            assert str(error.value) == f"with latent attention the cache {cache} runs on one device: leave mesh out"


def test_copies_of_a_kv_head_that_would_keep_other_tokens_are_refused(tmp_path):
    sizes = dict(batch_size=1, prompt_tokens=100, new_tokens=9, platform="cpu", mesh=mesh.Mesh(2, 4))
    for cache in ("snapkv", "quest"):
        with pytest.raises(InputError) as error:
            make_layout(config(tmp_path, num_key_value_heads=2), "float32", icejax.make_policy(cache, {}), **sizes)
        assert str(error.value) == f"the cache {cache} keeps a KV head on one device: leave tokens out of heads=2,tokens=4"
