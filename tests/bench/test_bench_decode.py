"""`bench.decode` and `bench.prefill` time what they claim: caches are filled as by a prefill, and bytes are counted."""

import contextlib
import json
import sys
import types
import weakref

import jax
import numpy as np
import pytest
import transformers

from bench import decode, memory, prefill
from bench.steps import shapes
from bench.steps.fill import BASE, fill
from bench.steps.scopes import python_ms, scope_of
from bench.steps.subjects import Transformers, _warm_up
from icejax.cache.registry import Clustered, Full, Packed
from icejax.checks.errors import InputError
from icejax.engine.plan import make_plan
from icejax.ops.pages.key_codes import decode_keys
from icejax.runtime import compiler_options, devices
from tests.helpers import families
from tests.helpers.layer import assert_digests, stored

CONTEXT = BASE + 1500


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return families.load(families.build(families.row("llama-gqa")), tmp_path_factory.mktemp("model"))


def test_random_weights_have_the_deviation_of_their_fan_in():
    """On a CPU, bfloat16 weights are stored as their bits."""
    random_model = shapes.model("attention", dtype="bfloat16", layers=1).model
    for weight, fan_in in (
        (random_model.layers[0].self_attn.q_proj.weight, 512),
        (random_model.layers[0].self_attn.o_proj.weight, 4096),
    ):
        numbers = np.asarray(weight.get_value().weights("float32"))[:, 0]
        assert numbers.shape[1] == fan_in and abs(numbers.std() * fan_in**0.5 - 1) < 0.01 and abs(numbers.mean()) < 1e-3
    assert (np.asarray(random_model.norm.weight[...]) == 1).all() and numbers[0].std() > 0 and (numbers[0] != numbers[1]).any()


@pytest.mark.slow
def test_a_filled_clustered_cache_is_whole(model):
    policy = Clustered(budget=64)
    plan = make_plan(model, policy, batch_size=2, prompt_tokens=CONTEXT, new_tokens=16)
    state, pool = fill(model, plan, policy, context=CONTEXT)
    pool_pages, lengths = stored(pool, state.cache.table), state.cache.lengths
    num_tokens = int(lengths.seen[0])
    assert CONTEXT - policy.page_size < num_tokens <= CONTEXT and (np.asarray(lengths.seen) == num_tokens).all()
    device_tokens = policy.window_layout.sinks + policy.window_layout.fill
    for layer, layer_state in enumerate(state.cache.layers):
        counts = np.asarray(layer_state.index.levels[0].count)
        assert (counts.sum(-1) + device_tokens == num_tokens).all()
        pages = [pool_pages[1, page, layer, 0, 0, :count] for page, count in enumerate(counts[1, 0])]
        assert_digests(layer_state.index.levels, 1, 0, pages)
    first, repeated = (pool_pages[0, page, 0, 0, 0] for page in (0, (BASE - device_tokens) // policy.page_size))
    assert 0 < np.abs(first - repeated).max() < 1.0  # a copy with noise


@pytest.mark.slow
def test_a_filled_packed_cache_has_codes_of_all_pages(model):
    """Without pages in host memory the same codes."""
    policy = Packed(budget=64)
    plan, alone = (
        make_plan(model, x, batch_size=1, prompt_tokens=CONTEXT, new_tokens=16) for x in (policy, Packed(budget=64, exact=0))
    )
    state, pool = fill(model, plan, policy, context=CONTEXT)
    codes, empty = fill(model, alone, Packed(budget=64, exact=0), context=CONTEXT)
    assert empty == ()
    for mine, same in zip(state.cache.layers, codes.cache.layers, strict=True):
        assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), mine.index, same.index))
    pages = stored(pool, state.cache.table)[0]
    for layer, layer_state in enumerate(state.cache.layers):
        index = layer_state.index
        counts, keys = np.asarray(index.count), np.asarray(decode_keys(index.keys, policy.page_size, policy.codes, "float32"))
        used = int((counts > 0).sum(-1).max())
        assert counts.sum(-1).max() + policy.window_layout.sinks + policy.window_layout.fill == int(state.cache.lengths.seen[0])
        assert np.abs(keys[0, 0, :used] - pages[:used, layer, 0, 0, :, : keys.shape[-1]]).mean() < 0.1 * keys.std()


def test_a_filled_full_cache_repeats_real_keys(model):
    plan = make_plan(model, Full(), batch_size=1, prompt_tokens=CONTEXT, new_tokens=16)
    state, pool = fill(model, plan, Full(), context=CONTEXT)
    keys = np.asarray(state.cache.layers[1].k)
    assert pool is None and int(state.cache.lengths.seen[0]) == CONTEXT
    assert (keys[:, :CONTEXT] != 0).any(-1).all() and not keys[:, CONTEXT:].any()
    assert 0 < np.abs(keys[:, :1500] - keys[:, BASE:CONTEXT]).max() < 1.0


def test_time_is_booked_to_the_scope_that_spent_it():
    hlo = """
  %fused = f32[4] fusion(%p), metadata={op_name="jit(step)/select/exp" stack_frame_id=1}
  %dot.1 = f32[1,4] dot(%x, %leaves_1_.1), lhs_contracting_dims={0}
  %dot.2 = f32[1,4] dot(%x, %leaves_0_.1), lhs_contracting_dims={0}
  %bare = f32[4] custom-call(%q)
  ROOT %last = f32[4] fusion(%bare), metadata={op_name="jit(step)/attend/rgs,rsh->rgh/dot_general" stack_frame_id=1}
  %copy = f32[4] copy(%q), metadata={op_name="jit(step)/reshape"}
"""
    scopes = scope_of(hlo, ["model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight"])
    expected = dict(fused="select", bare="attend", last="attend", copy="other") | {"dot.1": "output", "dot.2": "other"}
    assert scopes == expected


def test_python_is_what_a_step_takes_beside_the_programs():
    def event(name: str, ts: float, dur: float) -> dict:
        return dict(ph="X", name=name, ts=ts, dur=dur)

    steps = [event("$step.py:212 step", start, 1000.0) for start in (0.0, 2000.0)]
    twice = [event("PjitFunction(step)", start + skew, 800.0 - skew) for start in (100.0, 2100.0) for skew in (0.0, 5.0)]
    flush = [event("PjitFunction(flush)", 2950.0, 20.0), event("PjitFunction(other)", 3500.0, 400.0)]
    assert python_ms([*flush, *twice, *steps, dict(ph="M", name="thread")]) == pytest.approx((0.2 + 0.18) / 2)


@pytest.fixture
def snapkv(monkeypatch):
    """A stand-in for kvpress, which needs another version of transformers; it keeps the newest tokens."""
    ratios = []

    class SnapKVPress:
        def __init__(self, compression_ratio: float) -> None:
            ratios.append(compression_ratio)

        @contextlib.contextmanager
        def __call__(self, model):
            yield
            cache = model.cache_used
            for layer in cache.layers:
                num_kept = round(layer.keys.shape[2] * (1 - ratios[-1]))
                layer.keys, layer.values = layer.keys[:, :, -num_kept:], layer.values[:, :, -num_kept:]

    monkeypatch.setitem(sys.modules, "kvpress", types.SimpleNamespace(SnapKVPress=SnapKVPress))
    forward = transformers.LlamaForCausalLM.forward

    def remember(self, *args, past_key_values, **options):
        self.cache_used = past_key_values
        return forward(self, *args, past_key_values=past_key_values, **options)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", remember)
    return ratios


def test_snapkv_keeps_the_budget_of_a_prompt_that_was_run(snapkv):
    config = families.SIZES | dict(model_type="llama")
    subject = Transformers(config, "kvpress", budget=16, context=64, batch=1, steps=4)
    subject.step()
    row = subject.row()
    heads, size = config["num_key_value_heads"], config["hidden_size"] // config["num_attention_heads"]
    assert snapkv == [0.75] and row["budget"] == 16 and row["filled"] is False and row["ttft_s"] > 0
    assert row["device_kv_bytes"] == 2 * config["num_hidden_layers"] * 17 * heads * config.get("head_dim", size) * 4


def test_all_memory_may_be_pinned_before_device_use(monkeypatch):
    calls = []

    def model(*_, **__):
        calls.append("model")
        raise InputError("no weights here")

    monkeypatch.setattr(devices, "set_limits", lambda: calls.append("pinned limit"))
    monkeypatch.setattr(shapes, "model", model)
    with pytest.raises(SystemExit):
        decode.main([])
    assert calls == ["pinned limit", "model"]


@pytest.mark.parametrize(
    "policy, steps, expected",
    [
        (Full(), 64, 17),
        (Clustered(budget=256), 64, 17),
        (Clustered(budget=256, page_size=64), 4, 65),
        (Clustered(budget=256, compact_every=64), 64, 65),
        (Clustered(budget=256, compact_every=64), 46, 17),
        (Clustered(budget=256, compact_every=64), 47, 65),
    ],
)
def test_what_later_steps_call_is_compiled_in_the_warm_up(model, policy, steps, expected):
    """The 64th step compacts; after a warm-up of 17 steps it is timed step 47."""
    plan = make_plan(model, policy, batch_size=1, prompt_tokens=1024, new_tokens=steps)
    assert _warm_up(plan, steps) == expected


def test_compiler_options_are_added_and_taken_out(monkeypatch, capsys):
    monkeypatch.setitem(compiler_options.OPTIONS, "cpu", dict(one="1", two="2"))
    monkeypatch.setitem(sys.modules, "kvpress", None)
    line = "--shape bundled --contexts 1024 --policies transformers-kvpress"
    assert decode.main([*line.split(), "--flag", "one=", "--flag", "three=a=b"]) == 0
    assert compiler_options.OPTIONS["cpu"] == dict(two="2", three="a=b")
    with pytest.raises(SystemExit) as end:
        decode.main(["--flag", "one"])
    assert end.value.code == 2 and "--flag must be NAME=VALUE, got 'one'" in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_told_and_left_out(capsys, monkeypatch):
    pytest.importorskip("torch")  # the peer imports torch first
    monkeypatch.setitem(sys.modules, "kvpress", None)
    line = "--shape bundled --contexts 1024 --steps 1 --policies transformers-kvpress"
    assert decode.main(line.split()) == 0
    out, err = capsys.readouterr()
    assert not out and err.startswith("transformers-kvpress, 1024: left out: import of kvpress halted")


@pytest.mark.parametrize("steps", [0, 1])
def test_a_subject_whose_first_steps_do_not_fit_is_left_out_and_freed(steps, capsys):
    class Fake:
        warm_up = 2

        def __init__(self, left: int) -> None:
            self.left = left

        def step(self) -> None:
            self.left -= 1
            if self.left < 0:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")

        def rest(self) -> None:
            pass

        def row(self) -> dict:
            return dict(left=self.left)

    made = []

    def make(left: int) -> Fake:
        assert not [subject for subject in made if subject() is not None]
        made.append(weakref.ref(subject := Fake(left)))
        return subject

    subjects = dict(large=lambda **_: make(steps), small=lambda **_: make(100))
    (row,) = decode.rows(subjects, context=1024, batch=1, steps=16, filled=True)
    assert row["policy"] == "small" and row["left"] == 100 - 2 - 17
    assert capsys.readouterr().err == "large, 1024: left out: RESOURCE_EXHAUSTED: out of memory\n"


def test_memory_beyond_the_loaded_model_is_not_less_for_what_loading_took(monkeypatch):
    taken = 2**28

    def loaded(*_, **__):
        np.ones(taken, "int8")  # freed again
        return lambda: None, "a version"

    monkeypatch.setattr(prefill, "_ours", loaded)
    row = prefill.measure("full", "bundled", None, "float32", 1024, 0, False)
    assert row["peak_rss_bytes"] - row["model_rss_bytes"] > 0.9 * taken
    assert row["model_rss_bytes"] == pytest.approx(memory.resident(), abs=2**26)


@pytest.mark.parametrize("bench", [decode, prefill], ids=["decode", "prefill"])
def test_bad_options_are_one_line(capsys, bench):
    for line, message in (
        (["--policies", "full,ful"], "--policies must be of full, clustered"),
        (["--lengths" if bench is prefill else "--contexts", "4k"], "must be whole numbers, comma-separated, got '4k'"),
    ):
        with pytest.raises(SystemExit) as end:
            bench.main(line)
        err = capsys.readouterr().err
        assert end.value.code == 2 and len(err.splitlines()) == 1 and message in err


@pytest.mark.slow
def test_rows_count_bytes_as_the_shapes_say(capsys, tmp_path):
    line = "--shape bundled --contexts 2048,4096 --steps 16 --policies full,clustered,transformers-dynamic"
    assert decode.main([*line.split(), "--plot", str(tmp_path / "plot.png"), "--profile", str(tmp_path)]) == 0
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    timed, scopes = rows[:6], rows[6:]
    token = 2 * 4 * 2 * 64 * 4  # keys and values, layers, KV heads, channels, fp32
    for row in timed:
        assert 0 < row["tpot_low_s"] <= row["tpot_s"] <= row["tpot_high_s"]
        if row["policy"] == "full":
            assert row["device_kv_bytes"] >= row["context"] * token and row["moved_bytes_per_step"] == 0
        if row["policy"] == "clustered":
            vectors = row["moved_bytes_per_step"] / (4 * 2 * 64 * 4)  # per layer and head: the keys of pages, and the values
            assert 112 * 16 + 192 <= vectors <= 112 * 16 + 207
            assert row["digest_bytes"] > 4 * 64 * 4 * 8 * row["context"] / 16
    assert [row["policy"] for row in scopes] == ["full", "clustered"] and scopes[1]["scope_ms"]["select"] > 0
    assert all(0 < row["python_ms"] < row["scope_ms"]["mlp"] for row in scopes)
    assert (tmp_path / "plot.png").stat().st_size > 10_000
