"""`bench.program`: what it reads in compiled programs, and its estimates of step times, on small cases with known answers."""

import dataclasses

import jax
import pytest

from bench.program import __main__ as command
from bench.program import compile, estimate, hlo, thunks, work
from bench.program.estimate import Rates
from bench.program.hlo import Traffic
from bench.program.targets import TARGETS
from bench.program.work import Work
from bench.steps.sizes import nbytes
from icejax.cache.registry import Clustered
from icejax.runtime import devices

# A pool of 64 pages of 16 x 32 in host memory; K and V of a layer, 1 MB each, one of them updated in place.
GPU = """HloModule jit_step, is_scheduled=true

%fused_gather (p.0: u16[64,16,32], p.1: s32[4]) -> u16[4,16,32] {
  %p.0 = u16[64,16,32]{2,1,0:S(5)} parameter(0)
  %p.1 = s32[4]{0} parameter(1)
  ROOT %gather.1 = u16[4,16,32]{2,1,0} gather(%p.0, %p.1), offset_dims={1,2}
}

%fused_update (q.0: bf16[8,512,128], q.1: bf16[8,1,128]) -> bf16[8,512,128] {
  %q.0 = bf16[8,512,128]{2,1,0} parameter(0)
  %bitcast.9 = bf16[8,512,128]{2,1,0} bitcast(%q.0)
  %q.1 = bf16[8,1,128]{2,1,0} parameter(1)
  %constant.1 = s32[] constant(0)
  ROOT %dus = bf16[8,512,128]{2,1,0} dynamic-update-slice(%bitcast.9, %q.1, %constant.1, %constant.1, %constant.1)
}

%region (a: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %limit = s32[]{:T(128)} constant(28)
  ROOT %less = pred[] compare(%a, %limit), direction=LT
}

%open (b: s32[]) -> pred[] {
  %b = s32[] parameter(0)
  ROOT %less.1 = pred[] compare(%b, %b), direction=LT
}

ENTRY %main.1 (k: bf16[8,512,128], new: bf16[8,1,128], pool: u16[64,16,32], rows: s32[4]) -> (bf16[8,512,128]) {
  %k = bf16[8,512,128]{2,1,0} parameter(0)
  %new = bf16[8,1,128]{2,1,0} parameter(1)
  %pool = u16[64,16,32]{2,1,0:S(5)} parameter(2)
  %rows = s32[4]{0} parameter(3)
  %update.1 = bf16[8,512,128]{2,1,0} fusion(%k, %new), kind=kLoop, calls=%fused_update, metadata={op_name="jit(step)/append/dus"}
  %fetched.1 = u16[4,16,32]{2,1,0:S(5)} fusion(%pool, %rows), kind=kLoop, calls=%fused_gather, metadata={op_name="jit(step)/fetch/gather"}
  %copy-start.1 = (u16[4,16,32]{2,1,0}, u16[4,16,32]{2,1,0:S(5)}, u32[]) copy-start(%fetched.1)
  %copy-done.1 = u16[4,16,32]{2,1,0} copy-done(%copy-start.1)
  %triton.1 = u16[4,16,32]{2,1,0} custom-call(%rows, %pool), custom_call_target="__gpu$xla.gpu.triton"
  %bitcast.2 = u16[4,512]{1,0} bitcast(%copy-done.1)
  %sort.1 = u16[4,512]{1,0} sort(%bitcast.2), dimensions={1}, to_apply=%region
  %copy.7 = u16[64,16,32]{2,1,0} copy(%pool)
  %while.1 = (s32[]) while(%rows), condition=%region, body=%region
  %while.2 = (s32[]) while(%rows), condition=%open, body=%region
  %while.3 = (s32[]) while(%rows), condition=%open, body=%region, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %tuple.1 = (bf16[8,512,128]{2,1,0}) tuple(%update.1)
}
"""
LISTING = """000: kCommandBuffer [source       | next=061 (1)]
    001: kCustomKernel [source | sink] update_1 grid: [1, 1, 1] threads: [256, 1, 1]  shared_memory: 0 bytes
    002: kCustomKernel [prev=001 (1) | sink] triton_1 grid: [1, 1, 1] threads: [256, 1, 1]  shared_memory: 0 bytes
003: kSelectK       [source       | sink        ]   SelectKThunk(batch_size=8, num_elements=513, k=56, dtype=11)
020: kConditional   [prev=000 (1) | next=000 (1)]   
  false_branch:
    004: kWhile        [prev=109 (1) | sink        ]       
condition:
        005: kCustomKernel [source | sink] less grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
      body:
        006: kCustomKernel [source | sink] update_1 grid: [4, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
  true_branch:
    007: kCustomKernel [source | sink] fetched_1 grid: [4, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
    009: kAsyncStart   [prev=007 (1) | next=010 (1)] stream=computation_stream[0], async_id=9
        008: kCopy [source | sink] (no description)
    010: kAsyncDone    [source       | sink        ] async_id=9
"""
NAMES = {
    1: "update.1",
    2: "triton.1",
    3: "sort.1",
    4: "while.2",
    5: "less",
    6: "update.1",
    7: "fetched.1",
    8: "copy-start.1",
    20: "x",
}
METADATA = "".join(
    f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{name}"\n    thunk_id: {number}\n  }}\n}}\n'
    for number, name in {0: "command_buffer", **NAMES}.items()
)
PAGES = 4 * 16 * 32 * 2  # bytes fetched


@pytest.fixture(scope="module")
def module():
    return hlo.parse(GPU)


def moved(module: hlo.Module, name: str) -> Traffic:
    entry = module.computations[module.entry]
    return hlo.traffic(module, entry, entry[name])


def test_an_update_in_place_moves_what_is_new(module):
    assert moved(module, "update.1") == Traffic(device=2 * 8 * 128 * 2)  # read and written


def test_only_fetched_rows_of_a_host_table_cross_the_bus(module):
    assert moved(module, "fetched.1") == Traffic(device=4 * 4, bus_in=PAGES, bus_out=PAGES)
    assert moved(module, "fetched.1").bus == PAGES  # both ways at once
    assert moved(module, "copy-start.1") == Traffic(device=PAGES, bus_in=PAGES)
    assert moved(module, "triton.1") == Traffic(device=4 * 4 + PAGES, bus_in=PAGES)


def test_rounds_of_a_loop_are_known_from_its_text_or_its_bound(module):
    entry = module.computations[module.entry]
    assert [hlo.trips(module, entry[f"while.{i}"]) for i in (1, 2, 3)] == [28, None, 7]


def test_a_copy_as_large_as_the_pool_is_found(module):
    assert hlo.pool_copies(module, (64, 16, 32), 2) == ["copy.7"]
    assert not hlo.pool_copies(module, (64, 16, 32), 1)


def test_thunks_are_listed_with_what_they_launch():
    graph, select, branch = thunks.parse(LISTING, METADATA)
    assert [x.instruction for x in graph.inner] == ["update.1", "triton.1"] and not graph.instruction
    assert (select.kind, select.instruction) == ("kSelectK", "sort.1")
    assert [(x.kind, x.branch) for x in branch.inner] == [
        ("kWhile", "false_branch"), ("kCustomKernel", "true_branch"),
        ("kAsyncStart", "true_branch"), ("kAsyncDone", "true_branch"),
    ]  # fmt: skip
    assert [(x.instruction, x.branch) for x in branch.inner[0].inner] == [("less", "condition"), ("update.1", "body")]
    assert [x.pair for x in branch.inner] == ["", "", "9", "9"]


def test_a_step_is_what_runs_where_no_row_has_ended(module):
    scopes = {"update.1": "append", "fetched.1": "fetch", "triton.1": "fetch"}
    step_work = work.of_gpu(module, thunks.parse(LISTING, METADATA), scopes)
    expected = dict(graph=1, kernel=3, select=1, branch=1, start=1, wait=1, blocking=1)
    assert work.counts(step_work) == expected
    assert work.launches(step_work) == 4  # a graph, a selection, and a kernel and a copy of the branch
    by_scope = work.by_scope(step_work)
    assert by_scope["append"] == dict(kernels=1, device_bytes=2 * 8 * 128 * 2, bus_bytes=0)
    # The copy has no scope, and takes that of the operation that made its operand.
    assert by_scope["fetch"] == dict(kernels=2, device_bytes=2 * (4 * 4 + PAGES), bus_bytes=4 * PAGES)


TPU = """HloModule jit_step

%body (b: s32[]) -> s32[] {
  %b = s32[]{:T(128)} parameter(0)
  %pool = u16[64,16,32]{2,1,0:S(5)} parameter(1)
  %next = s32[]{:T(128)} add(%b, %b)
  STARTS
  ROOT %out = u16[4,16,32]{2,1,0} fusion(%FIRST), kind=kLoop
}

%region (a: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %limit = s32[]{:T(128)} constant(28)
  ROOT %less = pred[] compare(%a, %limit), direction=LT
}

ENTRY %main (b: s32[]) -> s32[] {
  %b = s32[]{:T(128)} parameter(0)
  ROOT %while.1 = (s32[]) while(%b), condition=%region, body=%body
}
"""
START = "%s.N = ((u16[64,16,32]{2,1,0:S(5)}, s32[]), u16[1,16,32]{2,1,0}, u32[]{:S(2)}) dynamic-slice-start(%pool, %b)"
DONE = "%d.N = u16[1,16,32]{2,1,0} dynamic-slice-done(%s.N)"


@pytest.mark.parametrize(
    ("order", "serial"), [((START, DONE) * 2, 56), ((START,) * 2 + (DONE,) * 2, 0)], ids=["by-turns", "together"]
)
def test_serial_copies_are_told_from_concurrent_ones(order, serial):
    numbers = [sum(x is line for x in order[:i]) for i, line in enumerate(order)]
    lines = [line.replace("N", str(number)) for line, number in zip(order, numbers, strict=True)]
    text = TPU.replace("STARTS", "\n  ".join(lines)).replace("FIRST", "d.0")
    step_work = work.of_tpu(hlo.parse(text), {})
    assert work.counts(step_work) == dict(loop=1, start=56, wait=56, kernel=28)
    assert work.serial_waits(step_work) == serial
    assert sum(times * x.traffic.bus_in for x, times in work.flat(step_work)) == 56 * 16 * 32 * 2


RATES = Rates(kernel=2, ramp=1, device=1000, bus=100, launch=5, copy=10, stall=20)  # us, and bytes per us


def kernel(name: str, device: int = 0, bus: int = 0, after: tuple[str, ...] = ()) -> Work:
    return Work("kernel", name, traffic=Traffic(device, bus_in=bus), after=after)


def took(*items: Work, concurrent: bool = False) -> float:
    """Returns the estimated microseconds."""
    return 1000 * estimate.milliseconds(list(items), RATES, concurrent=concurrent)


GRAPH = Work(
    "graph",
    inner=(
        kernel("query"),
        kernel("keys", bus=1000, after=("query",)),
        kernel("weights", device=4000),
        kernel("attend", after=("keys", "weights")),
    ),
)


def test_kernels_of_a_graph_form_a_chain_or_follow_data():
    # Launch 5, query 2, keys 10 over the bus, weights 4 and ramp 1, attend 2; concurrently, the weights hide behind the keys.
    assert took(GRAPH) == pytest.approx(5 + 2 + 10 + 5 + 2)
    assert took(GRAPH, concurrent=True) == pytest.approx(5 + 2 + 10 + 2)


def test_no_order_of_kernels_moves_bytes_faster_than_the_memory():
    wide = Work("graph", inner=tuple(kernel(f"weights.{i}", device=4000) for i in range(8)))
    assert took(wide, concurrent=True) == pytest.approx(5 + 8 * 4)


def test_two_kernels_share_the_bus():
    two_kernels = Work("graph", inner=(kernel("keys", bus=1000), kernel("values", bus=1000)))
    assert took(two_kernels, concurrent=True) == pytest.approx(5 + 20)


def test_a_copy_costs_what_is_not_hidden_behind_kernels():
    copy = Work("start", "c", traffic=Traffic(500, bus_in=500), pair="1")
    assert took(copy, kernel("a"), Work("wait", pair="1")) == pytest.approx(5 + 10)
    assert took(copy, kernel("a", device=30000), Work("wait", pair="1")) == pytest.approx(30 + 1)


def test_the_host_waits_at_a_condition_that_is_in_no_graph():
    branch = Work("branch", "b", inner=(kernel("a"),))
    assert took(branch) == pytest.approx(20 + 2)
    captured = dataclasses.replace(branch, captured=True)
    assert took(Work("graph", inner=(captured,)), Work("select", "k")) == pytest.approx(5 + 2 + 5 + 2)


def test_awaited_copies_in_a_loop_cost_a_round_trip_each():
    starts = [Work("start", traffic=Traffic(100, bus_in=100), pair=str(i)) for i in range(2)]
    waits = [Work("wait", pair=str(i)) for i in range(2)]
    by_turns, together = (starts[0], waits[0], starts[1], waits[1]), (*starts, *waits)
    for inner, microseconds in ((by_turns, 2 * (1 + 10)), (together, 2 * 1 + 10)):
        loop = Work("loop", "l", inner=inner, times=28, captured=True)
        assert took(loop) == pytest.approx(28 * microseconds)


def test_every_target_has_rates_and_says_what_they_rest_on():
    for target in TARGETS.values():
        low, mid, high = estimate.RATES[target.name]
        assert low.device > mid.device > high.device and low.device < target.bandwidth / 1e6
        reasons = " ".join(estimate.reasons(target, concurrent=True))
        assert f"{low.kernel:.3g} / {mid.kernel:.3g} / {high.kernel:.3g} us" in reasons and "{" not in reasons


def test_the_floor_counts_what_a_step_must_read():
    model = compile.abstract_model("attention", dtype="bfloat16", layers=2)
    target, tokens = TARGETS["h200"], 131072
    policy = Clustered(dense_layers=1)
    step = compile.decode_step(model, policy, target, batch=1, context=tokens, new_tokens=64, backend=None)
    # Per layer: q and o of 512 x 4096, k and v of 512 x 1024, three of 512 x 512, two norms; then the tied embedding.
    weights = 2 * (2 * 512 * 4096 + 2 * 512 * 1024 + 3 * 512 * 512 + 2 * 512) + 256 * 512 + 512
    slots, pages = step.plan.spec.capacity, step.plan.pool.pages
    nodes = 4 * 128 * 2 + 4  # a digest's vectors and its count
    digests = 8 * nodes * (-(-pages // 16) + 56 * 16)
    read = 2 * weights + 2 * 8 * 128 * 2 * slots + digests
    floor = estimate.floor(target, step)
    assert floor["device_ms"] == pytest.approx(read / (0.9 * 4.8e9), rel=0.02, abs=0.005)
    vectors = 112 * 16 + 256 - 16 - 1  # keys of twice 56 pages; values of the budget less the smallest window
    assert floor["bus_ms"] == pytest.approx(vectors * 8 * 128 * 2 / 52e6, abs=0.005)
    assert floor["ms"] == max(floor["device_ms"], floor["bus_ms"])


def test_a_step_is_described_with_no_array_of_its_pool():
    model = compile.abstract_model("attention", dtype="bfloat16", layers=2)
    sizes = dict(batch=8, context=2**20, new_tokens=64, backend="gather")
    step = compile.decode_step(model, Clustered(), TARGETS["h100"], **sizes)
    pool = step.arguments[2]
    assert nbytes(pool) > 60e9 and not any(isinstance(x, jax.Array) for x in jax.tree.leaves(step.arguments))
    (traced,) = [x for x in step.program.trace(*step.arguments).jaxpr.in_avals if x.shape == pool.shape]
    assert traced.memory_space == devices.HOST


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--target h300", "--target must be of h100, h200, a100, v5e, v6e, got 'h300' (did you mean h200?)"),
        ("--weights plain,nf4", "--weights must be one of plain, int8, fp8, int4, got 'nf4'"),
        ("--context 4k", "--context must be whole numbers, comma-separated, got '4k'"),
        ("--batch 0", "--batch must be"),
        ("--cache clustred", "unknown cache 'clustred'"),
        ("--cache-option budget", "--cache-option must be KEY=VALUE, got 'budget'"),
        ("--flag xla_dump_to", "--flag must be NAME=VALUE, got 'xla_dump_to'"),
        ("--fetch-backend gathr", "--fetch-backend must be of "),
    ],
)
def test_bad_options_are_one_line(capsys, monkeypatch, line, message):
    monkeypatch.setattr(compile.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(SystemExit) as end:
        command.main(["--shape", "attention", "--layers", "1", *line.split()])
    err = capsys.readouterr().err
    assert end.value.code == 2 and len(err.splitlines()) == 1 and message in err


@pytest.mark.parametrize(("target", "plugin"), [("h100", "jax_cuda12_plugin"), ("v6e", "libtpu")])
def test_a_compiler_that_is_not_there_is_one_line(capsys, monkeypatch, target, plugin):
    monkeypatch.setattr(compile.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as end:
        command.main(["--target", target])
    expected = f"error: compiling for {target} needs {plugin}: pip install -e '.[aot]'\n"
    assert end.value.code == 2 and capsys.readouterr().err.endswith(expected)


def test_newer_versions_of_jax_are_told_apart_for_their_triton(capsys, monkeypatch):
    monkeypatch.setattr(compile.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    with pytest.raises(SystemExit) as end:
        command.main(["--shape", "attention", "--layers", "1", "--fetch-backend", "triton"])
    err = capsys.readouterr().err
    assert (
        end.value.code == 2 and len(err.splitlines()) == 1 and "compiles no Triton kernel without a GPU: use jax 0.10.2" in err
    )
