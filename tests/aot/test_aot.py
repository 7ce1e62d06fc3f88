"""Every program that touches the cache compiles for GPU and TPU without either, and copies no pool there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.program.compile import check_compiler
from bench.program.targets import TARGETS
from icejax.checks.errors import InputError

STEPS = [
    ("h100", "step", "gather", "1"),
    ("h100", "step", "gather", "2"),
    ("h100", "step", "gather", "1", "int8"),
    ("h100", "step", "host_compute", "1"),
    ("h100", "step", "host_compute", "2"),
    ("h100", "step", "triton", "1"),
    ("h100", "step", "triton", "2"),
    ("v5e", "step", "slices", "1"),
    ("v5e", "step", "slices", "2"),
    ("v5e", "step", "host_compute", "1"),
    ("v5e", "step", "host_compute", "2"),
]
NAMES = ("prefill", "extend", "flush", "flushed", "compact", "write", "write-pages", "write-extent", "read-extent")
HERE = ("h100", "triton"), ("v5e", "slices")
OTHERS = [(target, name, backend) for target, backend in HERE for name in NAMES]
OTHERS.remove(("v5e", "prefill", "slices"))  # which reads no pool, as extend does, and takes minutes to compile
OTHERS += [(target, "insert", backend, "4") for target, backend in HERE]

FEW = "--layers 4 --cache-option dense_layers=2"  # of each kind two: 32 take minutes to compile
GRAPHS = (
    f"--context 131072 --batch 1,8 {FEW}",
    f"--context 131072 --batch 1,8 {FEW} --cache-option resident=true",
    f"--context 131072 --batch 4 {FEW} --cache tolerant",
    f"--context 131072 --batch 1,8 {FEW} --cache coded",
    f"--context 32768 --batch 1 {FEW} --weights int4",
    "--context 131072 --layers 4 --cache full",
    "--context 32768 --batch 4,8 --layers 4 --cache full",
)
# Each family on each target, and each batch on both.
EXPERTS = [("h100", 8, "qwen3_moe"), ("v5e", 1, "qwen3_moe"), ("h100", 1, "gpt_oss"), ("v5e", 8, "gpt_oss")]


def said(target: str, *command: str, backend: str = "") -> list[dict]:
    """Returns the JSON lines of a command that compiles for a target."""
    try:
        check_compiler(TARGETS[target], backend)
    except InputError as error:
        pytest.skip(str(error))
    plain = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # the suite's own are for speed
    command = [sys.executable, "-m", *command]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=plain)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def compiled(target: str, *options: str) -> dict:
    """Returns what `tests.aot.aot` says of a program."""
    return said(target, "tests.aot.aot", target, *options, backend=options[1])[-1]


@pytest.mark.slow
@pytest.mark.parametrize("case", STEPS, ids="-".join)
def test_the_step_copies_no_pool_and_sorts_no_pages(case):
    found = compiled(*case)
    assert not found["pool_copies"]
    # What is fetched may be staged; a tenth of the pool is far more than that.
    assert found["host_temp_bytes"] < found["pool_bytes"] / 10 and found["temp_bytes"] < found["pool_bytes"] / 10
    if case[0] == "h100":
        assert max(found["sorted_sizes"], default=0) <= 1024  # tokens of the fetched pages, not pages


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids="-".join)
def test_other_programs_write_in_place_and_copy_no_pool(case):
    found = compiled(*case)
    if case[1] == "insert":  # nothing but the state, in place
        assert found["alias_bytes"] >= found["levels_bytes"] and found["temp_bytes"] < found["levels_bytes"] / 10
    elif case[1] == "flushed":  # a vector of every page of a layer is a 64th of the pool
        assert found["alias_bytes"] >= found["levels_bytes"] and found["temp_bytes"] < found["pool_bytes"] / 100
    elif case[1].startswith("write"):
        assert found["alias_bytes"] >= found["pool_bytes"] and found["host_temp_bytes"] < found["pool_bytes"] / 100
    else:
        assert not found["pool_copies"] and found["host_temp_bytes"] < found["pool_bytes"] / 20


@pytest.mark.slow
@pytest.mark.parametrize("line", GRAPHS)
def test_the_step_is_one_graph(line):
    for row in said("h100", "bench.program", "--target", "h100", *line.split(), backend="triton"):
        assert (row["launches"], row["graph_launches"], row["blocking"]) == (1, 1, 0), row
        assert not row["pool_copies"]


@pytest.mark.slow
def test_int4_step_of_32_layers_is_one_graph_and_faster():
    line = "--context 32768 --cache full --weights plain,int4"
    plain, coded = said("h100", "bench.program", "--target", "h100", *line.split(), backend="triton")
    assert [row["weights"] for row in (plain, coded)] == ["bfloat16", "int4"] and coded["layers"] == 32
    assert (coded["launches"], coded["graph_launches"], coded["blocking"]) == (1, 1, 0)
    assert coded["weight_bytes"] < 0.4 * plain["weight_bytes"] and coded["ms"]["mid"] < 0.7 * plain["ms"]["mid"]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_pages_of_a_tpu_come_together(target):
    line = "--layers 4 --cache-option dense_layers=2 --context 131072"
    (row,) = said(target, "bench.program", "--target", target, *line.split())
    assert row["host_copies"] > 0 and not row["serial_waits"] and not row["pool_copies"]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "options"), [("h100", ""), ("h100", "codes=2"), ("v5e", "singly=false")])
def test_coded_step_copies_neither_codes_nor_pool(target, options):
    line = "--layers 4 --cache-option dense_layers=2 --context 131072 --cache coded"
    more = [word for option in options.split() for word in ("--cache-option", option)]
    (row,) = said(target, "bench.program", "--target", target, *line.split(), *more)
    bits = 2 if options == "codes=2" else 4
    assert row["temp_bytes"] < 131072 * 8 * 128 * bits // 8  # the codes of one layer of 8 KV heads of 128
    assert not row["pool_copies"] and not row["serial_waits"]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "batch", "family"), [*EXPERTS, ("h100", 8, "gemma4_text"), ("v5e", 1, "gemma4_text")])
def test_a_step_copies_no_experts(target, batch, family):
    plain, *coded = said(target, "tests.aot.aot_experts", target, str(batch), family)
    assert len(coded) == {"qwen3_moe": 6, "gpt_oss": 1, "gemma4_text": 0}[family]
    for found in (plain, *coded):
        matrix, experts = found["matrix_elements"], found["experts"]
        assert found["largest"] < experts * matrix / 10
        assert found["temp_bytes"] < 2 * batch * found["chosen"] * matrix  # a bf16 matrix of those taken, not to speak of all
    for found in coded:
        bits = 4 if found["kind"][0] in ("int4", "float4_e2m1fn") else 8
        assert found["argument_bytes"] < plain["argument_bytes"] * (bits + 2) / 16


@pytest.mark.slow
@pytest.mark.parametrize(("target", "batch", "family"), EXPERTS)
def test_a_step_brings_experts_from_the_host_and_copies_no_table(target, batch, family):
    for found in said(target, "tests.aot.aot_experts", target, str(batch), family, "64"):
        assert found["table_bytes"] and not found["table_copies"], found["kind"]
        brought = batch * found["chosen"] * found["matrix_elements"]
        # The bits that come of three matrices, those as numbers of the model's dtype, and little else.
        assert found["temp_bytes"] < 3 * 5 * brought and found["host_temp_bytes"] < found["table_bytes"] / 10, found


@pytest.mark.slow
def test_a_large_batch_reads_each_expert_once():
    line = "--shape qwen3-30b-a3b --layers 2 --context 4096 --batch 32 --cache full --target h100,v6e"
    experts = 2 * 128 * 3 * 768 * 2048 * 2  # bytes
    gpu, tpu = said("h100", "bench.program", *line.split())
    for row in (gpu, tpu):
        assert experts <= row["scopes"]["mlp"]["device_bytes"] < 1.1 * experts and row["temp_bytes"] < experts / 50
    assert (gpu["launches"], gpu["graph_launches"], gpu["blocking"], gpu["sorts"]) == (1, 1, 0, 0)


@pytest.mark.slow
def test_the_step_with_experts_in_host_memory_is_one_graph():
    line = "--shape qwen3-30b-a3b --layers 2 --weights plain,int4 --experts-on-host 64 --cache full,clustered --context 4096"
    for row in said("h100", "bench.program", "--target", "h100", *line.split(), backend="triton"):
        assert (row["launches"], row["graph_launches"], row["blocking"]) == (1, 1, 0) and not row["pool_copies"]
        expert = row["expert_host_bytes"] / (2 * 128)
        assert 2 * 8 * expert <= row["bus_bytes"] < 2 * 8 * expert * 1.1 + 2**20


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "v5e"])
def test_no_copy_of_a_quantised_matrix_stands_in_the_step(target):
    rows = said(target, "tests.aot.aot_quantized", target)
    assert len(rows) == 2 * 5 and not [row for row in rows if row["copies"]]


@pytest.mark.slow
def test_latent_step_copies_neither_head_weights_nor_digests():
    rows = said("h100", "tests.aot.aot_latent", "h100")
    assert len(rows) == 4 and not [row for row in rows if row["copies"]]
