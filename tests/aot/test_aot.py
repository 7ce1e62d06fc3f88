"""Every program that touches the cache is compiled ahead of time for GPU and TPU; the compiled program copies no pool."""

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
BACKENDS = ("h100", "triton"), ("v5e", "slices")
OTHER_PROGRAMS = [(target, name, backend) for target, backend in BACKENDS for name in NAMES]
OTHER_PROGRAMS.remove(("v5e", "prefill", "slices"))  # it reads no pool, unlike `extend`, and takes minutes to compile
OTHER_PROGRAMS += [(target, "insert", backend, "4") for target, backend in BACKENDS]
OTHER_PROGRAMS += [("h100", name, "triton", "1", "look") for name in NAMES if name != "prefill"]
UNITS = [(target, name, backend) for target, backend in BACKENDS for name in ("unit-keys", "unit-block", "unit-head")]
MESH = [(target, name, backend, "1", "mesh") for target, backend in BACKENDS for name in ("step", "unit-block", "write")]
CACHE_SCOPES = {"append", "select", "fetch", "attend", "evict"}

FOUR_LAYERS = "--layers 4 --cache-option dense_layers=2"  # two dense layers and two others: 32 layers take minutes to compile
GRAPHS = (
    f"--context 131072 --batch 1,8 {FOUR_LAYERS}",
    f"--context 131072 --batch 1,8 {FOUR_LAYERS} --cache-option resident=true",
    f"--context 131072 --batch 4 {FOUR_LAYERS} --cache tolerant",
    f"--context 131072 --batch 1,8 {FOUR_LAYERS} --cache coded",
    f"--context 131072 --batch 1,8 {FOUR_LAYERS} --cache packed",
    f"--context 131072 --batch 1 {FOUR_LAYERS} --cache packed --cache-option exact=0",
    f"--context 131072 --batch 1 {FOUR_LAYERS} --cache packed --cache-option estimate=true",
    f"--context 131072 --batch 1,8 {FOUR_LAYERS} --cache-option look=4",
    f"--context 32768 --batch 1 {FOUR_LAYERS} --weights int4",
    "--context 131072 --layers 4 --cache full",
    "--context 32768 --batch 4,8 --layers 4 --cache full",
)
# Every family on every target, and every batch size on every target.
EXPERTS = [("h100", 8, "qwen3_moe"), ("v5e", 1, "qwen3_moe"), ("h100", 1, "gpt_oss"), ("v5e", 8, "gpt_oss")]


def json_lines(target: str, *command: str, backend: str = "") -> list[dict]:
    """Returns the JSON lines of a command that compiles for `target`; skips the test without that compiler."""
    try:
        check_compiler(TARGETS[target], backend)
    except InputError as error:
        pytest.skip(str(error))
    environment = {
        name: value for name, value in os.environ.items() if name != "XLA_FLAGS"
    }  # the test suite's flags turn optimisation off
    command = [sys.executable, "-m", *command]
    process = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=environment)
    assert process.returncode == 0, process.stderr[-2000:]
    return [json.loads(line) for line in process.stdout.splitlines()]


def compiled(target: str, *options: str) -> dict:
    """Returns the JSON line of `tests.aot.aot` for a program."""
    return json_lines(target, "tests.aot.aot", target, *options, backend=options[1])[-1]


@pytest.mark.slow
@pytest.mark.parametrize("case", STEPS, ids="-".join)
def test_the_step_copies_no_pool_and_sorts_no_pages(case):
    report = compiled(*case)
    assert not report["pool_copies"]
    # Fetched pages may be staged; they are far less than a tenth of the pool.
    assert report["host_temp_bytes"] < report["pool_bytes"] / 10 and report["temp_bytes"] < report["pool_bytes"] / 10
    if case[0] == "h100":
        assert max(report["sorted_sizes"], default=0) <= 1024  # tokens of the fetched pages, not pages


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHER_PROGRAMS, ids="-".join)
def test_other_programs_write_in_place_and_copy_no_pool(case):
    report = compiled(*case)
    if case[1] == "insert":  # writes the state in place
        assert report["alias_bytes"] >= report["levels_bytes"] and report["temp_bytes"] < report["levels_bytes"] / 10
    elif case[1] == "flushed":  # one vector per page of a layer is a 64th of the pool
        assert report["alias_bytes"] >= report["levels_bytes"] and report["temp_bytes"] < report["pool_bytes"] / 100
    elif case[1].startswith("write"):
        assert report["alias_bytes"] >= report["pool_bytes"] and report["host_temp_bytes"] < report["pool_bytes"] / 100
    else:
        assert not report["pool_copies"] and report["host_temp_bytes"] < report["pool_bytes"] / 20


@pytest.mark.slow
@pytest.mark.parametrize("case", UNITS, ids="-".join)
def test_units_of_a_prefill_write_in_place(case):
    """Nothing but the results of a few numbers is allocated, and what a unit of 1,024 tokens computes; no unit has the pool."""
    report = compiled(*case)
    assert not report["pool_copies"] and not report["host_temp_bytes"]
    assert report["output_bytes"] - report["alias_bytes"] < 10_000 and report["temp_bytes"] < report["pool_bytes"] / 2


@pytest.mark.slow
@pytest.mark.parametrize("case", MESH, ids="-".join)
def test_on_eight_devices_sums_alone_cross_and_the_pool_stays(case):
    """Of 8 KV heads each device has one. Hidden states are summed and logits gathered: no weight, no page, nothing of the cache.

    In a unit of a prefill a device has an eighth of the tokens: they are gathered before a layer's halves and summed behind them.
    """
    report = compiled(*case)
    hidden = [x for x in report["collectives"] if "finish" not in x["scope"]]
    if case[1] == "unit-block":
        assert [x["opcode"] for x in hidden] == ["all-gather", "reduce-scatter"] * 2
        # XLA:GPU lists the input too.
        assert {x["elements"] for x in hidden} <= {512 * 1024, 512 * 1024 // 8, 512 * 1024 * 9 // 8}
    else:
        # Of a step the embedding too.
        assert [(x["opcode"], x["elements"]) for x in hidden] == [("all-reduce", 512)] * (5 if case[1] == "step" else 0)
    # A step's three counters, and its logits.
    others = sorted(x["elements"] for x in report["collectives"] if "finish" in x["scope"])
    assert others == ([3, max(others)] if case[1] == "step" else []) and max(others, default=0) < 300
    for x in report["collectives"]:
        assert x["opcode"] in ("all-reduce", "reduce-scatter") or x["scope"].endswith("/gathered/all_gather"), x
        assert not CACHE_SCOPES & set(x["scope"].split("/")), x
    assert report["host_temp_bytes"] < report["pool_bytes"] / 10
    assert report["alias_bytes"] >= report["pool_bytes"] if case[1] == "write" else not report["pool_copies"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "options"), [("h100", "--shape attention --layers 1"), ("v5e", "--layers 2 --weights int4")]
)
def test_a_step_copies_no_keys_and_values_of_a_device_with_one_kv_head(target, options):
    line = f"--target {target} {options} --devices 8 --context 131072 --cache full --whole"
    (row,) = json_lines(target, "bench.scale", *line.split())
    # The embedding's sum and the gathered logits, which XLA:TPU gathers by a sum.
    assert row["sums"] + row["other_collectives"] == 2 * row["layers"] + 2 and row["other_collectives"] == (target == "h100")
    # With a copy of the values by XLA:GPU 38 MB, else 3.
    assert row["temp_bytes"] < row["state_bytes"] / 10
    # On a TPU keys and values could be copied near the cores and back: 0.9 of them more. Of the embedding a row is read.
    embedding = 128256 * 8192 * 2 / 8 if target == "v5e" else 0
    assert row["device_bytes"] < row["weight_bytes"] - embedding + 1.3 * row["state_bytes"]


@pytest.mark.slow
def test_a_prefill_on_eight_devices_holds_an_eighth_of_the_hidden_states():
    line = "--shape attention --devices 8 --context 32768"
    (row,) = json_lines("h100", "bench.scale.prefill", *line.split())
    assert row["hidden_bytes"] == 32768 * 512 * 2 // 8 and row["collectives"] == ["all-gather", "reduce-scatter"]


@pytest.mark.slow
@pytest.mark.parametrize("line", GRAPHS)
def test_the_step_is_one_graph(line):
    for row in json_lines("h100", "bench.program", "--target", "h100", *line.split(), backend="triton"):
        assert (row["launches"], row["graph_launches"], row["blocking"]) == (1, 1, 0), row
        assert not row["pool_copies"]


@pytest.mark.slow
def test_int4_step_of_32_layers_is_one_graph_and_faster():
    line = "--context 32768 --cache full --weights plain,int4"
    plain, coded = json_lines("h100", "bench.program", "--target", "h100", *line.split(), backend="triton")
    assert [row["weights"] for row in (plain, coded)] == ["bfloat16", "int4"] and coded["layers"] == 32
    assert (coded["launches"], coded["graph_launches"], coded["blocking"]) == (1, 1, 0)
    assert coded["weight_bytes"] < 0.4 * plain["weight_bytes"] and coded["ms"]["mid"] < 0.7 * plain["ms"]["mid"]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_pages_of_a_tpu_come_together(target):
    line = "--layers 4 --cache-option dense_layers=2 --context 131072"
    (row,) = json_lines(target, "bench.program", "--target", target, *line.split())
    assert row["host_copies"] > 0 and not row["serial_waits"] and not row["pool_copies"]


@pytest.mark.slow
def test_codes_without_pages_compile_for_a_tpu():
    line = "--layers 4 --cache-option dense_layers=2 --context 131072 --cache packed --cache-option exact=0"
    (row,) = json_lines("v5e", "bench.program", "--target", "v5e", *line.split())
    assert (row["pool_bytes"], row["pool_copies"]) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize(("target", "options"), [("h100", ""), ("h100", "codes=2"), ("v5e", "singly=false")])
def test_coded_step_copies_neither_codes_nor_pool(target, options):
    line = "--layers 4 --cache-option dense_layers=2 --context 131072 --cache coded"
    cache_options = [word for option in options.split() for word in ("--cache-option", option)]
    (row,) = json_lines(target, "bench.program", "--target", target, *line.split(), *cache_options)
    # 37 MB on an H100 at 2 and 4 bits; keys of one layer of 8 KV heads of 128 in 2 or 4 bits take 34 or 67 MB more.
    assert row["temp_bytes"] < 131072 * 8 * 128 // 2
    assert not row["pool_copies"] and not row["serial_waits"]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "batch", "family"), [*EXPERTS, ("h100", 8, "gemma4_text"), ("v5e", 1, "gemma4_text")])
def test_a_step_copies_no_experts(target, batch, family):
    plain, *coded = json_lines(target, "tests.aot.aot_experts", target, str(batch), family)
    assert len(coded) == {"qwen3_moe": 6, "gpt_oss": 1, "gemma4_text": 0}[family]
    for report in (plain, *coded):
        matrix, experts = report["matrix_elements"], report["experts"]
        assert report["largest"] < experts * matrix / 10
        assert report["temp_bytes"] < 2 * batch * report["chosen"] * matrix  # less than a bf16 matrix of each chosen expert
    for report in coded:
        bits = 4 if report["kind"][0] in ("int4", "float4_e2m1fn") else 8
        assert report["argument_bytes"] < plain["argument_bytes"] * (bits + 2) / 16


@pytest.mark.slow
@pytest.mark.parametrize(("target", "batch", "family"), EXPERTS)
def test_a_step_brings_experts_from_the_host_and_copies_no_table(target, batch, family):
    for report in json_lines(target, "tests.aot.aot_experts", target, str(batch), family, "64"):
        assert report["table_bytes"] and not report["table_copies"], report["kind"]
        fetched_elements = batch * report["chosen"] * report["matrix_elements"]
        # The fetched bits of three matrices, the same matrices in the model's dtype, and little else.
        assert report["temp_bytes"] < 3 * 5 * fetched_elements and report["host_temp_bytes"] < report["table_bytes"] / 10, (
            report
        )


@pytest.mark.slow
def test_a_large_batch_reads_each_expert_once():
    line = "--shape qwen3-30b-a3b --layers 2 --context 4096 --batch 32 --cache full --target h100,v6e"
    experts = 2 * 128 * 3 * 768 * 2048 * 2  # bytes
    gpu, tpu = json_lines("h100", "bench.program", *line.split())
    for row in (gpu, tpu):
        assert experts <= row["scopes"]["mlp"]["device_bytes"] < 1.1 * experts and row["temp_bytes"] < experts / 50
    assert (gpu["launches"], gpu["graph_launches"], gpu["blocking"], gpu["sorts"]) == (1, 1, 0, 0)


@pytest.mark.slow
def test_the_step_with_experts_in_host_memory_is_one_graph():
    line = "--shape qwen3-30b-a3b --layers 2 --weights plain,int4 --experts-on-host 64 --cache full,clustered --context 4096"
    for row in json_lines("h100", "bench.program", "--target", "h100", *line.split(), backend="triton"):
        assert (row["launches"], row["graph_launches"], row["blocking"]) == (1, 1, 0) and not row["pool_copies"]
        expert = row["expert_host_bytes"] / (2 * 128)
        assert 2 * 8 * expert <= row["bus_bytes"] < 2 * 8 * expert * 1.1 + 2**20


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "v5e"])
def test_no_copy_of_a_quantised_matrix_stands_in_the_step(target):
    rows = json_lines(target, "tests.aot.aot_quantized", target)
    assert len(rows) == 2 * 10 and not [row for row in rows if row["copies"]]


@pytest.mark.slow
def test_latent_step_copies_neither_head_weights_nor_digests():
    rows = json_lines("h100", "tests.aot.aot_latent", "h100")
    assert len(rows) == 4 and not [row for row in rows if row["copies"]]
