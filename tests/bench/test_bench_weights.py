"""`bench.weights`, the matrix of weight formats, batch sizes and caches: its rows, byte counts and option errors."""

import json
import operator
import re
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from bench import weights
from bench.program.compile import abstract_model
from bench.steps import shapes
from bench.steps.sizes import nbytes
from icejax.api.generate import ASSETS
from icejax.checkpoint import load_model
from icejax.checkpoint.load import abstract
from icejax.checkpoint.quantized.rounding import METHODS
from icejax.models.registry import family

LINE = "--prompt-tokens 512 --steps 2 --repeats 2 --questions 1 --pieces 1"


@pytest.mark.slow
def test_a_row_for_weights_cache_and_batch(capsys):
    rows = []
    lines = (
        "plain --caches full,clustered-64 --batches 1",
        "int4 --caches full --batches 1",
        "int8 --caches full --batches 1,2",
    )
    for line in lines:
        assert weights.main(f"--weights {line} {LINE}".split()) == 0
        out, err = capsys.readouterr()
        assert "keys found" in err
        rows += [json.loads(line) for line in out.splitlines()]
    assert [(row["weights"], row["cache"], row["batch"]) for row in rows] == [
        ("float32", "full", 1),
        ("float32", "clustered-64", 1),
        ("int4", "full", 1),
        *(("int8", "full", batch) for batch in (1, 2)),
    ]
    plain, four, eight = (rows[i]["perplexity"] for i in (0, 2, 3))
    assert plain < four < 1.1 * plain and abs(eight / plain - 1) < abs(four / plain - 1)
    for row in rows:
        assert row["tokens_per_s"] > 0 and row["ttft_s"] > 0 and row["jax"] and row["device"]
        assert row["weight_bytes"] > 1e6 and row["needle"]["questions"] == 1
        assert (row["host_kv_bytes"] > 0) == (row["cache"] != "full")
    assert rows[4]["device_kv_bytes"] == 2 * rows[3]["device_kv_bytes"]


def test_codes_are_counted_by_their_bits():
    """On a CPU a 4-bit code takes a byte."""
    plain, rounded = (load_model(ASSETS, dtype="float32", quantize=name) for name in (None, "int4"))
    stored = ((key, leaf.size) for key, leaf in abstract(plain.config, "float32")[1].items())
    count = sum(size for key, size in stored if key.endswith("proj.weight"))
    before, after = (nbytes(nnx.state(model)) for model in (plain, rounded))
    assert after == before - 4 * count + count + 4 * count // 128


@pytest.mark.slow
def test_random_weights_are_timed_as_what_they_are(capsys):
    line = "--shape attention --weights plain,int8,int4 --caches full --batches 1,2 --prompt-tokens 32 --steps 2 --repeats 1"
    assert weights.main(line.split()) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["weights"], row["batch"]) for row in rows] == [(w, n) for w in ("float32", "int8", "int4") for n in (1, 2)]
    for row in rows:
        assert row["shape"] == "attention" and row["tokens_per_s"] > 0 and "humaneval" not in row
        assert row["left_out"] == "weights are random" and row["perplexity"] is row["needle"] is None
    # The shape: 4 layers, 32 query heads and 8 KV heads of 128, hidden size 512, MLP size 512.
    matrices, rows_of_all = 4 * 512 * (2 * 32 + 2 * 8 + 3 * 4) * 128, 4 * ((32 + 2 * 8) * 128 + 4 * 512)
    plain, eight, four = (row["code_bytes"] for row in rows[::2])
    assert plain == rows[0]["weight_bytes"] and eight == rows[2]["weight_bytes"] == plain - 3 * matrices + 4 * rows_of_all
    assert four == plain - 4 * matrices + matrices // 2 + 4 * matrices // 128
    assert rows[4]["weight_bytes"] == four + matrices // 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["int8", "fp8", "int4"])
def test_random_weights_are_rounded(method):
    plain = shapes.model("attention", dtype="float32", layers=1).model.layers[0]
    rounded = shapes.drawn(abstract_model("attention", dtype="float32", layers=1, rounding=METHODS[method])).model.layers[0]
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        plain_weight, rounded_weight = (operator.attrgetter(f"{name}.weight")(layer).get_value() for layer in (plain, rounded))
        dequantised = np.asarray(rounded_weight.weights("float32")).reshape(plain_weight.shape)  # from [O, G, g]
        assert abs(dequantised.std() / np.asarray(plain_weight).std() - 1) < 0.01
        if method != "int4":  # drawn in the same order
            error = np.linalg.norm(dequantised - np.asarray(plain_weight)) / np.linalg.norm(plain_weight)
            assert 0.002 < error < 0.03


@pytest.mark.slow
def test_memory_on_paper_is_that_of_the_shapes():
    page = (Path(weights.__file__).parent / "results/weights.md").read_text()
    table = re.findall(r"^\| `(\S+)` \| (.*) \|$", page, re.MULTILINE)
    assert len(table) == 5
    for name, row in table:
        figures = [float(text.replace(",", "")) for text in row.split(" | ")]
        for figure, method in zip(figures, (None, "int8", "int4"), strict=False):
            if method is None or not name.startswith("deepseek-r1"):  # experts
                model = abstract_model(name, dtype="bfloat16", rounding=METHODS.get(method))
                assert figure == round(nbytes(nnx.state(model)) / 1e9, 1), (name, method)
        config = family(shapes.raw_config(name)).read_config(shapes.raw_config(name))
        values = 1 if config.latent is not None else 2
        assert figures[3] == round(
            2 * values * config.num_hidden_layers * config.num_key_value_heads * config.head_dim / 1e3, 1
        )


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
