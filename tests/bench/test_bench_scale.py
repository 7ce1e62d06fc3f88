"""`bench.scale`: how steps of many layers are counted from few, the least times, the page; nothing is compiled."""

import json

import pytest

from bench.program import compile, hlo
from bench.program.targets import TARGETS
from bench.scale import __main__ as command
from bench.scale import page, prefill, programs
from bench.scale.links import MACHINES, bounds
from icejax.cache.registry import Clustered

BESIDE, DENSE, PAGES = dict(flops=7, temp_bytes=5), dict(flops=100, temp_bytes=2), dict(flops=1000, temp_bytes=90)


@pytest.fixture
def counting_of(monkeypatch):
    """Returns the function from a number of layers to their `Counting`, with figures that are sums over layers."""

    def figures(target, step, *, devices):
        layers = [PAGES if isinstance(policy, Clustered) else DENSE for policy in step.plan.policies]
        return {name: BESIDE[name] + sum(layer[name] for layer in layers) for name in BESIDE}

    def counting(layers: int) -> programs.Counting:
        model = compile.abstract_model("attention", dtype="bfloat16", layers=layers)
        return programs.Counting(TARGETS["h100"], model, batch=1, new_tokens=64)

    monkeypatch.setattr(programs, "figures", figures)
    return counting


def test_a_step_of_all_layers_is_counted_from_one_layer_of_each_kind(counting_of):
    """Of 4 layers two keep every token: what is beside the layers counts once, and temporary memory is the largest."""
    counting = counting_of(4)
    assert counting.counted(Clustered(dense_layers=2), 4096) == dict(flops=7 + 2 * 100 + 2 * 1000, temp_bytes=5 + 2 * 90)
    assert counting.compiled(Clustered(dense_layers=2), 4096)["flops"] == 7 + 2 * 100 + 2 * 1000
    assert len(counting._compiled) == 5  # one layer and two of each kind, and all


def test_layers_that_all_differ_are_compiled_whole(counting_of):
    for layers, counted in ((1, dict(flops=7 + 100, temp_bytes=5 + 2)), (2, dict(flops=7 + 100 + 1000, temp_bytes=5 + 2 + 90))):
        assert counting_of(layers).counted(Clustered(dense_layers=1), 4096) == counted


def test_the_least_times_of_the_links():
    counted = dict(flops=989e9, device_bytes=3.35e9, host_bytes=64e6, collective_bytes=450e6)
    assert bounds(MACHINES["h100"], 1, counted) == dict(flops=1, memory=1, link=0, host=1)
    assert bounds(MACHINES["h100"], 8, counted)["link"] == 1.75  # seven eighths of all bytes go out twice
    assert bounds(MACHINES["v5e"], 2, counted)["link"] == 9.0 and bounds(MACHINES["v5e"], 4, counted)["link"] == 6.75


CROSSING = """ENTRY %main (x: f32[1,1,512]) -> f32[1,1,512] {
  %x = f32[1,1,512]{2,1,0} parameter(0)
  %all-reduce-start = f32[1,1,512]{2,1,0} all-reduce-start(%x), metadata={op_name="jit(step)/total/psum"}
  %all-reduce-done = f32[1,1,512]{2,1,0} all-reduce-done(%all-reduce-start)
  ROOT %all-gather.1 = f32[8,1,512]{2,1,0} all-gather(%all-reduce-done), dimensions={0}
}
"""


def test_what_crosses_between_devices_is_found():
    module = hlo.parse(CROSSING)
    assert [(opcode, x.name) for opcode, x in hlo.collectives(module)] == [
        ("all-reduce", "all-reduce-start"), ("all-gather", "all-gather.1"),
    ]  # fmt: skip
    entry = module.computations["main"]
    assert hlo.traffic(module, entry, entry["all-reduce-start"]).device == 2 * 512 * 4


ROW = dict(
    shape="llama-3.1-70b", target="h100", devices=8, weights="int4", layers=80, context=131072, cache="clustered", whole=False,
    weight_bytes=8 * 2**30, state_bytes=2**30, pool_bytes=5 * 2**30, temp_bytes=2**20, flops=1e9, device_bytes=9e9,
    host_bytes=8e6, collective_bytes=5e6, sums=160, fits=True, ms=dict(flops=0.1, memory=2.5, link=0.02, host=0.2),
    jax="0.10.2", plugin="plugin 1",
)  # fmt: skip


def test_rows_replace_earlier_ones_and_make_the_page(tmp_path):
    labels = {name: ROW[name] for name in ("target", "devices", "weights", "shape")}
    left_out = labels | dict(context=None, cache=None, left_out="no room")
    small = ROW | dict(shape="attention", layers=6)
    for row in (ROW | dict(sums=1), left_out, ROW, small, small | dict(whole=True, flops=2e9)):
        page.add(tmp_path, row)
    rows = [json.loads(line) for line in (tmp_path / "scale.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and ROW in rows
    text = (tmp_path / "scale.md").read_text()
    assert "| 8 | int4 | clustered | 8.00 | 1.00 | 1 | yes | 5.00 | 1.0 | 9.00 | 8.0 | 5.0 | 160 | 2.50 |" in text
    assert "| 400 |" in text and "* llama-3.1-70b, int4 on 8 x h100: no room" in text  # tokens/s of 2.5 ms
    assert "| attention | 6 | 131,072 | 8 x h100 | clustered | 1.0000 | 1.0000 | 1.0000 | 1.0000 | 0.5000 |" in text
    assert text.count("| 8 | int4 |") == 1  # steps that were compiled whole are checks alone


def test_sizes_alone_are_those_of_the_shapes(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(compile, "without_devices", lambda count: None)
    monkeypatch.setattr(programs, "compile_for", lambda *_: pytest.fail("a program is compiled"))
    line = "--sizes --shape attention --layers 2 --devices 1 --target h100 --context 4096 --cache full,clustered --out"
    assert command.main([*line.split(), str(tmp_path)]) == 0
    full, clustered = map(json.loads, capsys.readouterr().out.splitlines())
    layer = 2 * 512 * 32 * 128 + 2 * 512 * 8 * 128 + 3 * 512 * 512 + 2 * 512  # queries, output; keys, values; MLP; norms
    assert full["weight_bytes"] == clustered["weight_bytes"] == 2 * (256 * 512 + 512 + 2 * layer)
    token = 2 * 2 * 2 * 8 * 128  # bytes of keys and values in two layers
    assert 1 < full["state_bytes"] / (4096 * token) < 1.1 and full["pool_bytes"] == 0 and full["fits"]
    assert "flops" not in full and "ms" not in full
    assert "| 1 | bfloat16 | full | 0.02 | 0.03 | - | yes | 0.00 | - | - |" in (tmp_path / "scale.md").read_text()


def test_sizes_alone_do_not_replace_a_compiled_row(tmp_path):
    alone = {name: value for name, value in ROW.items() if name not in ("ms", "flops", "temp_bytes", "jax", "plugin")}
    for row in (alone, ROW, alone):
        page.add(tmp_path, row)
    assert (tmp_path / "scale.jsonl").read_text() == json.dumps(ROW) + "\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--target h200", "--target must be of h100, v5e, got 'h200'"),
        ("--devices 3", "--devices must be of 1, 2, 4, 8, got 3"),
        ("--weights nf4", "--weights must be of plain, int8, fp8, int4, got 'nf4'"),
        ("--shape llama", "--shape must be of "),
        ("--sizes --whole", "--sizes compiles nothing: leave --whole out"),
    ],
)
def test_bad_options_are_one_line(capsys, monkeypatch, line, message):
    refused(command, capsys, monkeypatch, line, message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--target h900", "--target must be of"),
        ("--devices 3", "--devices must be of 1, 2, 4, 8, got 3"),
        ("--shape llama", "--shape must be of "),
        ("--context 0", "--context must be"),
    ],
)
def test_bad_options_of_a_prefill_are_one_line(capsys, monkeypatch, line, message):
    refused(prefill, capsys, monkeypatch, line, message)


def refused(command, capsys, monkeypatch, line, message):
    monkeypatch.setattr(compile, "without_devices", lambda count: None)
    with pytest.raises(SystemExit) as end:
        command.main(line.split())
    err = capsys.readouterr().err
    assert end.value.code == 2 and len(err.splitlines()) == 1 and message in err
