"""The choice of a cache: the faster one of every measured pair, and of two the one that fits."""

import dataclasses
from types import SimpleNamespace

import pytest

import icejax
from bench.steps.shapes import raw_config
from icejax.api import choice as choice_module
from icejax.api import engine as engine_module
from icejax.api.choice import Choice, Machine, choose, choose_for_session, crossing, this_machine
from icejax.cache.registry import IN_PAGES, ON_DEVICE, Full
from icejax.engine.buckets import bucket
from icejax.models.registry import family
from icejax.runtime import devices
from icejax.runtime.mesh import Mesh
from icejax.runtime.rates import RATES, rates_of

SMOLLM2 = dict(
    model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, rms_norm_eps=1e-5, hidden_act="silu", max_position_embeddings=8192, rope_theta=1e5,
    tie_word_embeddings=True,
)  # fmt: skip
QWEN = dict(
    model_type="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, rms_norm_eps=1e-6, hidden_act="silu", max_position_embeddings=32768, rope_theta=1e6,
    tie_word_embeddings=True,
)  # fmt: skip
PUBLISHED = dict(smollm2=SMOLLM2, qwen=QWEN)
GIB = 2**30
CPU = Machine(platform="cpu", kind="cpu", device_free=20 * GIB, host_free=20 * GIB, one_memory=True)
H200 = Machine(platform="gpu", kind="NVIDIA H200", device_free=130 * GIB, host_free=120 * GIB)
# Milliseconds of a step, full and clustered: bench/results/decode.md, h200/device.md and gpu.md, and the published models.
MEASURED = [
    (CPU, "attention", 4096, 1, 17.4, 21.4),
    (CPU, "attention", 16384, 1, 48.7, 25.4),
    (CPU, "attention", 131072, 1, 309, 31.6),
    (CPU, "bundled", 4096, 1, 1.7, 3.1),
    (CPU, "bundled", 32768, 1, 15.3, 5.0),
    (CPU, "llama-3.2-1b", 4096, 1, 198, 210),
    (CPU, "smollm2", 4022, 1, 25.8, 35.5),
    (CPU, "smollm2", 7900, 1, 32, 38),
    (CPU, "qwen", 8192, 1, 47.5, 57),
    (H200, "llama-3.1-8b", 131072, 1, 8.91, 9.92),
    (H200, "llama-3.1-8b", 131072, 4, 22.70, 23.43),
    (H200, "llama-3.1-8b", 524288, 1, 22.72, 11.55),
    (H200, "attention", 32768, 1, 0.78, 1.45),
    (H200, "attention", 131072, 1, 0.99, 1.96),
    (H200, "attention", 32768, 4, 0.72, 2.34),
    (H200, "attention", 131072, 4, 2.40, 2.46),
    (H200, "attention", 524288, 1, 2.49, 2.16),
    (H200, "smollm2", 8192, 1, 3.01, 9.04),
]


def config_of(name):
    raw = PUBLISHED.get(name) or raw_config(name)
    return family(raw).read_config(raw)


def dtype_of(machine):
    return "float32" if machine.platform == "cpu" else "bfloat16"


def chosen(name, machine, tokens, *, batch_size=1, new_tokens=64, joins=False) -> Choice:
    sizes = dict(batch_size=batch_size, prompt_tokens=tokens, new_tokens=new_tokens, joins=joins)
    return choose(config_of(name), dtype_of(machine), machine, **sizes)


@pytest.mark.parametrize("machine, name, tokens, batch_size, full, clustered", MEASURED)
def test_the_faster_cache_of_a_measured_pair_is_chosen(machine, name, tokens, batch_size, full, clustered):
    choice = chosen(name, machine, tokens, batch_size=batch_size)
    assert choice.policy == (ON_DEVICE if full < clustered else IN_PAGES) and choice.room is None
    assert "ms faster than with " + ("clustered" if full < clustered else "full") in choice.reason


def test_a_cache_that_does_not_fit_the_device_is_not_chosen():
    """131,072 tokens of Llama-3.1-8B take 17.2 GB in 16 bits; the prompt's input, queries and outputs 4.3 GB."""
    small = dataclasses.replace(H200, device_free=20 * GIB)
    choice = chosen("llama-3.1-8b", small, 131072 - 64)
    assert choice.policy == IN_PAGES
    why = "a full cache of 131,072 tokens and its prompt take 20.1 GiB, and the device has room for 19.0 GiB"
    assert choice.reason == f"clustered, budget 256: {why}"
    assert chosen("llama-3.1-8b", dataclasses.replace(small, device_free=22 * GIB), 131072 - 64).policy == ON_DEVICE
    assert chosen("llama-3.1-8b", dataclasses.replace(H200, device_free=80 * GIB), 131072, batch_size=4).policy == IN_PAGES


def test_pages_that_host_memory_does_not_hold_are_not_chosen():
    """Without room for either the pages are chosen, whose error says how much memory is missing."""
    small = dataclasses.replace(H200, host_free=GIB)
    choice = chosen("llama-3.1-8b", small, 524288)
    assert choice.policy == ON_DEVICE
    assert choice.reason == "full: pages of 524,352 tokens take 60.1 GiB of host memory, and 1.0 GiB is free"
    assert chosen("llama-3.1-8b", dataclasses.replace(small, device_free=GIB), 524288).policy == IN_PAGES


def test_on_a_cpu_pages_and_digests_are_in_one_memory():
    """32,768 tokens of the bundled model: 132 MiB of full cache, or 132 of pages and 17 of digests, beside 128 of the prompt."""
    both = dataclasses.replace(CPU, device_free=280 * 2**20)
    assert chosen("bundled", both, 32768 - 64).policy == ON_DEVICE
    assert chosen("bundled", dataclasses.replace(both, one_memory=False), 32768 - 64).policy == IN_PAGES


def test_a_session_begins_on_the_device_and_has_a_second_cache():
    config, card = config_of("llama-3.1-8b"), dataclasses.replace(H200, device_free=8 * GIB)
    choice = choose_for_session(config, "bfloat16", card, context_length=131072)
    assert choice.policy == icejax.Full(movable=True)
    assert choice.reason == f"full for the first {choice.room:,} tokens, as many as fit the device; then clustered, budget 256"

    def taken(room):
        """A slot takes 128 KiB, a token of a prompt that is prefilled 32 KiB; prompt and answers are padded each."""
        prompt, answers = bucket(room // 2 + 1), -(-bucket((room - 1) // 2) // 1024) * 1024
        return (prompt + answers) * 2**17 + prompt * 2**15

    assert choice.room == 40960 and taken(40960) <= 0.95 * 8 * GIB < taken(49152)
    assert choose_for_session(config, "bfloat16", H200, context_length=131072).policy == ON_DEVICE
    # Nothing to begin with, nowhere to move, and one memory for both.
    for machine in (
        dataclasses.replace(card, device_free=2**24),
        dataclasses.replace(card, host_free=GIB),
        dataclasses.replace(card, platform="cpu", kind="cpu", one_memory=True),
    ):
        assert choose_for_session(config, "bfloat16", machine, context_length=131072).policy == IN_PAGES
    assert choose_for_session(config_of("bundled"), "float32", CPU, context_length=32768).policy == IN_PAGES


@pytest.mark.parametrize("name, machine", [("bundled", CPU), ("smollm2", CPU), ("llama-3.1-8b", H200)])
def test_caches_cross_once(name, machine):
    config = config_of(name)
    length = crossing(config, dtype_of(machine), platform=machine.platform, kind=machine.kind)
    for tokens in (length // 4, length // 2, length):
        assert chosen(name, machine, tokens - 256, new_tokens=256).policy == ON_DEVICE
    for tokens in (length + 1, 2 * length):
        assert chosen(name, machine, tokens - 256, new_tokens=256).policy == IN_PAGES


def test_where_no_layer_has_pages_caches_do_not_cross():
    raw = SMOLLM2 | dict(model_type="mistral", sliding_window=256, num_hidden_layers=4, head_dim=64)
    config = family(raw).read_config(raw)
    assert crossing(config, "float32", platform="cpu", kind="cpu") is None
    sizes = dict(batch_size=1, prompt_tokens=10000, new_tokens=64, joins=False)
    assert choose(config, "float32", CPU, **sizes).policy == ON_DEVICE


def test_a_device_has_the_rates_of_its_kind():
    assert rates_of("gpu", "NVIDIA H100 80GB HBM3") == RATES["NVIDIA H100"]
    assert rates_of("gpu", "NVIDIA GeForce RTX 4090") == RATES["NVIDIA A100"]
    assert rates_of("tpu", "TPU v9") == RATES["TPU v5 lite"] and rates_of("cpu", "cpu").measured


def test_a_machine_has_the_memory_beside_the_weights(bundled, monkeypatch):
    model = bundled[0]
    whole = this_machine(model, device_memory=2**30, host_memory_limit=2**20)
    weights = 4 * (257 * 256 + 4 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 640 + 2 * 256) + 256)  # fp32, tied embeddings
    assert whole.device_free == 2**30 - weights and whole.host_free == 2**20 and not whole.one_memory
    assert this_machine(model).one_memory and this_machine(model).device_free > 2**20
    monkeypatch.setattr(model, "mesh", Mesh(2, 4))  # each KV head is on four of eight devices
    copied = this_machine(model, device_memory=2**30, host_memory_limit=2**20)
    assert (copied.device_free, copied.host_free) == ((8 * 2**30 - weights) // 4, 2**18)


def test_pages_may_take_what_xla_may_still_pin_and_each_process_has_its_limit(bundled, monkeypatch):
    model, held = bundled[0], SimpleNamespace(nbytes=10 * GIB, sharding=SimpleNamespace(memory_kind=devices.PINNED))
    monkeypatch.setattr(devices, "host_free", lambda: 75 * GIB)
    monkeypatch.setenv(devices.PINNED_LIMIT, "60")
    monkeypatch.setattr(devices.jax, "live_arrays", lambda: [held])
    assert devices.pinnable() == 75 * GIB
    monkeypatch.setattr(devices, "platform", lambda: "gpu")
    assert devices.pinnable() == 50 * GIB
    monkeypatch.setattr(choice_module.mesh, "processes_of", lambda _: 2)
    assert this_machine(model, device_memory=2**30, host_memory_limit=20 * GIB).host_free == 40 * GIB


def test_an_engine_leaves_room_for_cached_prefixes(bundled, monkeypatch):
    limits = []

    def batch_choice(*_, host_memory_limit, **__):
        limits.append(host_memory_limit)
        return Choice(Full(), "told")

    monkeypatch.setattr(engine_module, "batch_choice", batch_choice)
    for limit, prefixes in ((2**30, 2**20), (2**20, 2**30)):
        icejax.Engine(*bundled, context_length=100, host_memory_limit=limit, prefix_memory=prefixes).close()
    assert limits == [2**30 - 2**20, 0]


@pytest.mark.slow
def test_the_api_chooses_where_no_cache_is_named(bundled):
    lines = []
    options = dict(max_new_tokens=2, tell=lines.append)
    [short] = icejax.generate(*bundled, "import os\n", **options)
    assert short.run.cache == "full" and lines[0].startswith("full: for 12 tokens a step is estimated")
    [tight] = icejax.generate(*bundled, "import os\n", device_memory=12 * 2**20, **options)
    why = "a full cache of 12 tokens and its prompt take 3.0 MiB, and the device has room for 1.2 MiB"
    assert tight.run.cache == "clustered" and lines[1] == f"clustered, budget 256: {why}"
    with icejax.Engine(*bundled, context_length=600, batch_size=2, device_memory=12 * 2**20) as engine:
        assert engine.cache_choice.startswith("clustered, budget 256: a full cache of 2 x 1,198 tokens and ")
    with pytest.raises(icejax.InputError, match="device_memory must be at least 1, got 0"):
        icejax.generate(*bundled, "x", device_memory=0)
