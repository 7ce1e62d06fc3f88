"""What `bench.decode` and `bench.prefill` time is what they say: caches as a prefill would leave them, bytes by count."""

import json

import numpy as np
import pytest

from bench import decode, prefill
from bench.fill import BASE, fill
from bench.scopes import scope_of
from icejax.cache import Clustered, Full
from icejax.plan import make_plan
from icejax.sampling import Sampling
from tests import families
from tests.layer import assert_digests

CONTEXT = BASE + 1500


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return families.load(families.build(families.row("llama-gqa")), tmp_path_factory.mktemp("model"))


def test_a_filled_clustered_cache_is_whole(model):
    policy = Clustered(budget=64)
    plan = make_plan(model, policy, Sampling(), batch_size=2, prompt_tokens=CONTEXT, new_tokens=16)
    state, pool = fill(model, plan, policy, context=CONTEXT)
    pool, lengths = np.asarray(pool).view(np.float32), state.cache.lengths
    held = int(lengths.prompt[0])
    assert CONTEXT - policy.page_size < held <= CONTEXT and (np.asarray(lengths.prompt) == held).all()
    beside = policy.num_sinks + policy.num_window - policy.page_size
    for layer, kept in enumerate(state.cache.layers):
        counts = np.asarray(kept.levels[0].count)
        assert (counts.sum(-1) + beside == held).all()
        pages = [pool[i, layer, 1, 0, 0, :n] for i, n in enumerate(counts[1, 0][: len(pool)])]
        assert_digests(kept.levels, 1, 0, pages)
    first, again = (pool[i, 0, 0, 0, 0] for i in (0, (BASE - beside) // policy.page_size))
    assert 0 < np.abs(first - again).max() < 1.0  # a copy with noise


def test_a_filled_full_cache_repeats_real_keys(model):
    plan = make_plan(model, Full(), Sampling(), batch_size=1, prompt_tokens=CONTEXT, new_tokens=16)
    state, pool = fill(model, plan, Full(), context=CONTEXT)
    keys = np.asarray(state.cache.layers[1].k)
    assert pool is None and int(state.cache.lengths.prompt[0]) == CONTEXT
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
    found = scope_of(hlo, ["model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight"])
    expected = dict(fused="select", bare="attend", last="attend", copy="other") | {"dot.1": "output", "dot.2": "other"}
    assert found == expected


@pytest.mark.parametrize("bench", [decode, prefill], ids=["decode", "prefill"])
def test_bad_options_are_one_line(capsys, bench):
    for line, message in (
        (["--policies", "full,ful"], "--policies must be of full, clustered"),
        (["--lengths" if bench is prefill else "--contexts", "4k"], "invalid literal"),
    ):
        with pytest.raises(SystemExit) as end:
            bench.main(line)
        err = capsys.readouterr().err
        assert end.value.code == 2 and len(err.splitlines()) == 1 and message in err


@pytest.mark.slow
def test_rows_count_bytes_as_the_shapes_say(capsys, tmp_path):
    line = "--shape bundled --contexts 4096,8192 --steps 16 --policies full,clustered,transformers-dynamic"
    assert decode.main([*line.split(), "--plot", str(tmp_path / "plot.png"), "--profile", str(tmp_path)]) == 0
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    timed, scopes = rows[:6], rows[6:]
    token = 2 * 4 * 2 * 64 * 4  # keys and values, layers, KV heads, channels, fp32
    for row in timed:
        assert 0 < row["tpot_low_s"] <= row["tpot_s"] <= row["tpot_high_s"]
        if row["policy"] == "full":
            assert row["device_kv_bytes"] >= row["context"] * token and row["moved_bytes_per_token"] == 0
        if row["policy"] == "clustered":
            assert row["moved_bytes_per_token"] == 4 * 2 * 56 * 16 * 2 * 64 * 4  # layers, heads, pages, tokens
            assert row["digest_bytes"] > 3 * 64 * 4 * 8 * row["context"] / 16
    assert [row["policy"] for row in scopes] == ["full", "clustered"] and scopes[1]["scope_ms"]["select"] > 0
    assert (tmp_path / "plot.png").stat().st_size > 10_000
