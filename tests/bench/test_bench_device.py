"""`bench.device`: a part that fails or hangs harms no other, done parts are skipped, and the page shows the files."""

import json
import re
import tempfile
import time

import psutil
import pytest

from bench.device import __main__ as device
from bench.device import graphs, results, turns
from bench.device.running import Part
from icejax.api.generate import ASSETS
from icejax.checkpoint.load import open_checkpoint
from tests.helpers import families
from tests.helpers.device_rows import ENDS, FILES

GRAPH = """
000: kCommandBuffer [source       | next=017 (2)]
    001: kCopy         [source       | next=002 (1)] kCopy
    002: kCustomKernel [prev=001 (1) | sink        ] loop_fusion grid: [1, 1, 1] threads: [128, 1, 1]
017: kSelectK       [source       | sink        ]   SelectKThunk(batch_size=16, num_elements=2064, k=56, dtype=11)
063: kConditional   [prev=000 (1) | next=000 (1)]
  false_branch:
    025: kCopy         [source       | next=029 (4)] kCopy
    029: kWhile        [prev=028 (1) | sink        ]
condition:
        030: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1] threads: [1, 1, 1]
  true_branch:
    049: kCustomKernel [source       | next=051 (1)] loop_fusion grid: [7, 1, 1] threads: [128, 1, 1]
000: kCommandBuffer [prev=063 (1) | sink        ]
    064: kCustomKernel [source        | next=065 (1)] gemm_fusion_dot_21 grid: [960, 1, 1] threads: [64, 1, 1]
"""
COUNTED = dict(graphs=2, kernels=4, outside=dict(kSelectK=1, kConditional=1, kCopy=1, kWhile=1, kCustomKernel=2))


def part(name, program, *, least=0, most=10, file="some.jsonl", **more):
    return Part(name, file, ("-c", f"import json, os, pathlib, signal, sys, time\n{program}"), least=least, most=most, **more)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Returns a function that runs parts into one folder; it returns the status, the lines of stderr, and the rows by part."""
    (tmp_path / "temporary").mkdir()

    def run(*parts, options=()):
        monkeypatch.setattr(device, "parts", lambda *_: [*parts])
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        status = device.main(["--out", str(tmp_path / "out"), *options])
        rows_by_part = {}
        for row in results.Results(tmp_path / "out", tiny=False).rows():
            rows_by_part.setdefault(row.pop("part"), []).append(row)
        return status, capsys.readouterr().err.splitlines(), rows_by_part

    return run


def test_done_parts_are_not_rerun_and_failed_ones_come_last(run, tmp_path):
    program = f"open({str(tmp_path / 'journal')!r}, 'a').write(NAME + ' ')\nprint(json.dumps(dict(x=1)), flush=True)\n"
    first = part("first", program.replace("NAME", "'first'"), what=dict(setting="a"))
    fail_until_mended = f"sys.exit(0 if pathlib.Path({str(tmp_path / 'mended')!r}).exists() else 3)"
    second = part("second", program.replace("NAME", "'second'") + fail_until_mended)
    third = part("third", program.replace("NAME", "'third'"), least=30)
    status, lines, rows = run(first, second, third, options=["--minutes", "0.4"])
    assert (
        status == 1
        and re.search("third: not run: it needs 30 s, 2[0-9] s are left", "\n".join(lines))
        and "second: failed: status 3" in lines
    )
    assert rows == dict(first=[dict(setting="a", x=1)], second=[dict(x=1)])
    (tmp_path / "mended").touch()
    with (tmp_path / "out" / "some.jsonl").open("a") as file:
        file.write('{"part": "third", "x"')  # a row that was cut off
    status, lines, rows = run(first, second, third)
    assert status == 0 and lines == ["third: done", "second: done"]
    assert rows == dict(first=[dict(setting="a", x=1)], second=[dict(x=1)], third=[dict(x=1)])
    assert (tmp_path / "journal").read_text().split() == ["first", "second", "third", "second"]
    assert "missing" not in (tmp_path / "out" / "device.md").read_text()


def test_requested_parts_run_alone_in_order_and_again(run):
    parts = [part(name, "print(json.dumps(dict(at=time.monotonic())), flush=True)") for name in ("first", "second", "third")]
    _, _, before = run(*parts)
    _, lines, rows = run(*parts, options=["--part", "third", "--part", "first"])
    assert lines == ["third: done", "first: done"]
    assert rows["second"] == before["second"] and before["third"][0]["at"] < rows["third"][0]["at"] < rows["first"][0]["at"]


def test_a_part_that_hangs_is_ended_with_all_it_started(run):
    child = "import subprocess\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    hangs = part("hangs", f"{child}print(json.dumps(dict(pid=child.pid)), flush=True)\ntime.sleep(60)", most=3)
    started = time.monotonic()
    status, lines, rows = run(hangs, part("neighbour", "print(json.dumps(dict(x=2)))"))
    assert time.monotonic() - started < 20 and status == 1
    assert lines == ["hangs: ended after 3 s, which was its limit", "neighbour: done"] and rows["neighbour"] == [dict(x=2)]
    pid = rows["hangs"][0]["pid"]
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_part_that_crashes_is_told_and_the_rest_goes_on(run, tmp_path):
    crashes = part("crashes", "print(json.dumps(dict(x=1)), flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)")
    raises = part("raises", "print('no JSON')\nraise ValueError('no such shape')", file="other.jsonl")
    status, lines, rows = run(crashes, raises, part("neighbour", "print('[1]'), print(json.dumps(dict(x=2)))"))
    ends = ["crashes: failed: SIGSEGV", "raises: failed: status 1, ValueError: no such shape", "neighbour: done"]
    assert status == 1 and lines == ends and rows == dict(crashes=[dict(x=1)], neighbour=[dict(x=2)])
    page, log = ((tmp_path / "out" / name).read_text() for name in ("device.md", "log.txt"))
    assert "- crashes: failed: SIGSEGV." in page and "- raises: failed: status 1, ValueError: no such shape." in page
    assert "== raises: failed: status 1" in log and "no JSON\nTraceback" in log


def test_the_minutes_are_kept_and_a_short_part_may_still_run(run):
    status, lines, _ = run(part("long", "", least=70), part("short", ""), options=["--minutes", "1"])
    assert status == 0 and lines == ["long: not run: it needs 70 s, 60 s are left", "short: done"]
    status, lines, _ = run(part("slow", "time.sleep(60)"), part("long", "", least=2), options=["--minutes", "0.02"])
    assert status == 1 and lines[0] == "slow: ended after 1 s, which was its limit" and "long: not run" in lines[1]


def test_a_part_waits_for_the_model_that_it_needs(run, tmp_path):
    model = tmp_path / "model"
    parts = part("asks", "print(json.dumps(dict(x=1)))", needs=model), part("neighbour", "print(json.dumps(dict(x=2)))")
    status, lines, rows = run(*parts)
    told = f"asks: not run: it needs {model}, which is not on this machine: bring it there"
    assert status == 0 and lines == [told, "neighbour: done"] and rows == dict(neighbour=[dict(x=2)])
    model.mkdir()
    status, lines, rows = run(*parts)
    assert status == 0 and lines == ["asks: done"] and rows["asks"] == [dict(x=1)]


@pytest.mark.parametrize("tokens, factor", [(2048, 4), (2049, 8)])
def test_a_context_is_lengthened_by_yarn(tokens, factor, tmp_path):
    model, longer = tmp_path / "model", tmp_path / "longer"
    longer.mkdir()
    families.save(families.build(families.row("qwen2-plain")), model)  # of 512 positions
    assert turns.lengthened(model, longer, tokens=tokens) == factor
    before, config = (open_checkpoint(folder).config for folder in (model, longer))
    assert (before.context_length, config.context_length) == (512, 512 * factor)
    assert config.rope_scaling.rope_type == "yarn" and config.rope_theta == before.rope_theta
    assert {file.name for file in longer.iterdir()} == {file.name for file in model.iterdir()}
    assert (longer / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_questions_in_turns_are_scored(capsys):
    assert turns.main([str(ASSETS), "16384", "clustered", "1"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["length"] == 16384 and row["yarn"] == 4 and row["budget"] == 256
    assert all(row[f"turn_{i}"] in (0.0, 1.0) for i in (1, 2, 3)) and 0 <= row["similarity"] <= 1


def test_graphs_are_counted_once_and_kept(run, tmp_path):
    assert graphs.of_listing(GRAPH) == COUNTED
    dump = "folder = next(f.split('=')[1] for f in os.environ['XLA_FLAGS'].split() if f.startswith('--xla_dump_to='))\n"
    dump += f"os.makedirs(folder)\nlisting = pathlib.Path(folder, 'module_0007.jit_step.{graphs.LISTING[11:]}')\n"
    dump += f"listing.write_text({GRAPH!r})\n"
    rows = "print(json.dumps(dict(tpot_s=1.0, policy='full', context=8, batch=1)), flush=True)\n"
    cut = part("decode", dump + rows + "time.sleep(60)", counted=True, most=1)
    program = dict(policy="full", context=8, batch=1) | COUNTED
    assert [row for row in run(cut)[2]["decode"] if "graphs" in row] == [program]
    assert not (tmp_path / "temporary" / "out-scratch" / "dump").exists()
    # The program comes from the compile cache, so nothing is dumped.
    cached = part("decode", rows, counted=True)
    assert [row for row in run(cached)[2]["decode"] if "graphs" in row] == [program]


def test_programs_are_counted_in_the_order_of_compilation(tmp_path):
    for number, text in ((9998, GRAPH), (10002, "")):
        (tmp_path / f"module_{number}.jit_step.sm_9.0_gpu{graphs.LISTING[10:]}").write_text(text)
    assert [program["graphs"] for program in graphs.counted(tmp_path)] == [2, 0]


def test_files_stay_small(run, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "MOST", 2000)
    monkeypatch.setattr(results, "TAIL", 100)
    many = part("many", "for i in range(100): print(json.dumps(dict(text='x' * 90))), print('y' * 90, file=sys.stderr)")
    status, _, rows = run(many)
    end = results.Results(tmp_path / "out", tiny=False).ends()["many"]
    assert status == 0 and 10 < len(rows["many"]) < 20 and end["rows_left_out"] == 100 - len(rows["many"])
    assert (tmp_path / "out" / "some.jsonl").stat().st_size < 2500 and (tmp_path / "out" / "log.txt").stat().st_size < 200


def test_bad_options_are_one_line(run, tmp_path, capsys):
    run(part("first", ""))
    capsys.readouterr()
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "decode.jsonl").write_text('{"tpot_s": 1.0}\n')
    for out, options, message in (
        ("out", ["--minutes", "0"], "--minutes must be above 0 and at most 1440, got 0"),
        ("out", ["--part", "First"], "--part must be one of first, got 'First'"),
        ("out", ["--minutes", "nan"], "--minutes must be above 0 and at most 1440, got nan"),
        ("out", ["--tiny"], "holds results of the whole sizes: choose another folder, or run without --tiny"),
        ("file", [], "--out must be a folder that can be written, got "),
        ("other", [], "--out must be a new folder or one of earlier results, got "),
        ("empty", ["--page"], "--page needs results in --out, got none in "),
    ):
        with pytest.raises(SystemExit) as end:
            device.main(["--out", str(tmp_path / out), *options])
        err = capsys.readouterr().err
        assert end.value.code == 2 and len(err.splitlines()) == 1 and message in err


def test_the_page_says_what_the_files_say(tmp_path, monkeypatch):
    for name, rows in FILES.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (tmp_path / "decode.jsonl").open("a") as file:
        file.write("".join(json.dumps(dict(part=name, seconds=1, tiny=False) | end) + "\n" for name, end in ENDS.items()))
    names = ["versions and link", *ENDS, "model, full"]
    monkeypatch.setattr(device, "parts", lambda *_: [part(name, "sys.exit(9)") for name in names])
    assert device.main(["--out", str(tmp_path), "--page"]) == 1
    page = (tmp_path / "device.md").read_text()
    for line in (
        "gpu: NVIDIA H200; 16 cores, 137 GB on the host; 2026-11-22.",
        "nvidia-smi: name NVIDIA H200, driver_version 580.1.",
        "| triton | 512 of 8 KiB (doctor) | yes | 90.5 | 46.3 |",
        "| gather | 448, uint16, of 4.33 GB | no: other bits | 100 | 41.9 |",
        "| clustered | bfloat16 | 17 of 128 | 0.031 | 0.0021 |",
        "| hops | 8192 | clustered | 64 | 7 of 8 | 2.50 |",
        "| qwen | 50000 | 4 | clustered | 256 | 100% | 50% | 0% | 88% | 2 | 40.5 |",
        # The floor: 15.0e9 bytes of weights, 1.07e9 of two dense layers and 0.5e9 of digests at 0.9 of 4.8e12 a second.
        "| llama-3.1-8b | 131072 | 1 | clustered | resident=true, without xla_x, fetch by triton | 4.00 (3.00 - 5.00) | 3.83 | 1.0 | 1 | 2 kCopy |",
        # 1 ms of weights, half as much of cache and digests each, and 26 MB at 52 GB/s.
        "| llama-3.1-8b | 131072 | 1 | clustered | resident=true, without xla_x, fetch by triton | 25% | 12% | 12% | 12% |",
        "| llama-3.1-8b | 131072 | 1 | clustered | resident=true, without xla_x, fetch by triton | 4.80 | 2.40 | 2.40 | 16.00 | 30.00 | - |",
        "| 131072 | clustered | 1.5 | 0.25 | 0.02 |",
        "| llama-3.1-8b | 8 | 32768 | full | yes | 1.5 | 21845.3 |",
        "- model, 524288: failed: SIGSEGV.",
        "- model, full: not run.",
    ):
        assert line in page.splitlines() or line in page, line


def kind(part):
    """Returns what parts share that differ only in numbers: module, options and environment."""
    named = tuple(word for word in part.command if word.startswith("--"))
    return named, part.command[1], *part.environment, bool(part.xla_flags)


@pytest.mark.slow
def test_every_kind_of_part_runs_where_there_is_no_device(tmp_path, monkeypatch):
    # Each compiled program runs only a few steps.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    kinds = {kind(part): part for part in reversed(device.parts(device.TINY, tmp_path / "scratch"))}
    monkeypatch.setattr(device, "parts", lambda *_: [*reversed(kinds.values())])
    status = device.main(["--out", str(tmp_path / "out"), "--tiny", "--minutes", "30"])
    page = (tmp_path / "out" / "device.md").read_text()
    assert status == 0 and "What is missing" not in page, page
    titles = "Reading host memory, Text, Needles, Decode, Where a step's time goes, Memory, Prefill".split(", ")
    assert all(f"\n## {title}" in page for title in titles)
    assert "One large array" in page and all(f"| {n} | 448, uint8" in page for n in ("gather_flat", "host_compute", "slices"))
    files = [*(tmp_path / "out").iterdir()]
    assert len(files) <= 8 and max(file.stat().st_size for file in files) < 2**24


def test_a_page_that_cannot_be_made_costs_no_part(run, tmp_path):
    odd = part("odd", "print(json.dumps(dict(weight_bytes=1)), flush=True)\n")
    status, lines, rows = run(odd, part("next", "print(json.dumps(dict(x=1)), flush=True)\n"))
    assert status == 0 and rows["next"] and any("The page cannot be made of these results: KeyError" in line for line in lines)
    assert (tmp_path / "out" / "device.md").read_text().startswith("The page cannot be made")
