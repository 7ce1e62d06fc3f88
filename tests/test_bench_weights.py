"""The matrix of weights, batches and caches: what its rows say, and what its command line refuses."""

import json

import pytest
from flax import nnx

from bench import weights
from bench.sizes import nbytes
from icejax.checkpoint import load_model
from icejax.checkpoint.load import abstract
from icejax.generation import ASSETS

LINE = "--batches 1,2 --prompt-tokens 512 --steps 2 --repeats 2 --questions 1 --pieces 1"


@pytest.mark.slow
def test_a_row_for_weights_cache_and_batch(capsys):
    assert weights.main(f"--weights plain,int8,int4 --caches full,clustered-64 {LINE}".split()) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["weights"], row["cache"], row["batch"]) for row in rows] == [
        (name, cache, batch) for name in ("float32", "int8", "int4") for cache in ("full", "clustered-64") for batch in (1, 2)
    ]
    plain, eight, four = (row["perplexity"] for row in rows[::4])
    assert plain < four < 1.1 * plain and abs(eight / plain - 1) < abs(four / plain - 1)
    for row in rows:
        assert row["tokens_per_s"] > 0 and row["ttft_s"] > 0 and row["jax"] and row["device"] and not row["coded"]
        assert row["weight_bytes"] == rows[0]["weight_bytes"] > 1e7 and row["needle"]["questions"] == 1
        assert (row["host_kv_bytes"] > 0) == (row["cache"] != "full")
    assert rows[1]["device_kv_bytes"] == 2 * rows[0]["device_kv_bytes"] and "keys found" in err


def test_codes_are_told_and_counted_by_their_bits():
    plain, rounded = (load_model(ASSETS, dtype="float32", quantize=name, codes=True) for name in (None, "int4"))
    assert weights.coded(rounded) and not weights.coded(plain)
    stored = ((key, leaf.size) for key, leaf in abstract(plain.config, "float32")[1].items())
    count = sum(size for key, size in stored if key.endswith("proj.weight"))
    before, after = (nbytes(nnx.state(model)) for model in (plain, rounded))
    assert after == before - 4 * count + count // 2 + 4 * count // 128


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--weights plain,nf4", "--weights must be of plain, int8, fp8, int4, got 'nf4'"),
        ("--caches h2o", "--caches must be of full, clustered-64, clustered-256, got 'h2o'"),
        ("--batches 1,x", "--batches must be whole numbers, comma-separated, got '1,x'"),
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--prompt-tokens 10", "--prompt-tokens must be at least 512, got 10"),
        ("--model nowhere/at/all", "nowhere/at/all: expected a checkpoint folder"),
    ],
)
def test_bad_options_are_one_line(capsys, line, message):
    with pytest.raises(SystemExit) as end:
        weights.main(line.split())
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and err.startswith(f"python -m bench.weights: error: {message}")
    assert err.count("\n") == 1
