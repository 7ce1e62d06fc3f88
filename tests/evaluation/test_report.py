"""Reports on finished runs: pairs by the samples' names, rows, means by length and depth, and a page that asks no host."""

import html.parser
import json
import math
import stat
from types import SimpleNamespace

import numpy as np
import pytest

from icejax.checks.errors import InputError
from icejax.evaluation.answers import Answers
from icejax.evaluation.paired import difference
from icejax.evaluation.report import places, runs, table
from icejax.evaluation.scores import Scores

METRIC = ("hay", "found,none")
ABOUT = dict(model="tiny", dtype="float32", device="cpu: cpu", versions=dict(icejax="0.1.0"), context_length=64)
NAME = "</title><script src=//host></script>"  # of a model


def finished(folder, cache, budget, values, *, metric="found", first=0, model="tiny", seconds=0.01):
    """Writes a run with a sample for each value, at lengths 16 and 32 and depths 0 and 100 in turn; returns its folder."""
    samples = [
        dict(
            doc_id=i, doc_hash=f"d{i}", prompt_hash="p", filter="none", metrics=[metric],
            doc=dict(length=16 * (1 + i % 2), depth=100 * (i // 2 % 2)),
        )
        | {metric: value}
        for i, value in enumerate(values, first)
    ]  # fmt: skip
    took = dict(
        prompt_tokens=8,
        new_tokens=4,
        device_bytes=2**21,
        host_bytes=budget and 2**20,
        seconds_per_token=seconds,
        tokens_per_s=1 / seconds,
    )
    results = {
        "results": {"hay": {"alias": "hay", f"{metric},none": float(np.mean(values)), f"{metric}_stderr,none": 0.25}},
        "n-samples": {"hay": dict(original=len(values), effective=len(values))},
        "icejax": ABOUT | dict(model=model, cache=cache, budget=budget, tasks=dict(hay=took)),
        "samples": {"hay": samples},
    }
    Scores.of(results).save(folder)
    return folder


def test_scores_are_read_as_they_were_written(tmp_path):
    read = Scores.read(finished(tmp_path / "a", "full", None, [1, 0, 1]))
    assert read.totals == {METRIC: pytest.approx(2 / 3)} and read.errors == {METRIC: 0.25}
    assert read.samples == {METRIC: {"0 d0 p": 1, "1 d1 p": 0, "2 d2 p": 1}}
    assert read.places == {"hay": {"0 d0 p": (16, 0), "1 d1 p": (32, 0), "2 d2 p": (16, 100)}}


def test_a_row_has_the_difference_over_the_samples_of_both(tmp_path):
    finished(tmp_path / "b", "full", None, [1, 1, 1, 0])
    finished(tmp_path / "a", "clustered", 64, [0, 1, 0, 1], first=1)  # samples 1 to 4: three of them are also the other's
    finished(tmp_path / "c", "clustered", 64, [1], model="other")
    other, mine, theirs = runs.rows(runs.read([tmp_path]), "full")
    expected = difference([0, 1, 0], [1, 1, 0])
    assert (mine["difference"], mine["low"], mine["high"]) == expected and mine["difference"] == pytest.approx(-1 / 3)
    assert (mine["pairs"], mine["samples"], mine["against"]) == (3, 4, "full")
    assert "difference" not in theirs and "difference" not in other  # of another model
    assert (mine["score"], mine["stderr"], mine["budget"], mine["metric"]) == (0.5, 0.25, 64, "found")
    assert (mine["device_bytes"], mine["host_bytes"], mine["tokens_per_s"]) == (2**21, 2**20, 100)
    assert table.cells(mine) == (
        "hay", "found", "clustered 64", "0.5000 ± 0.2500", "4", "-0.3333", f"{mine['low']:+.4f} to {mine['high']:+.4f}", "2.0 MiB", "1.0 MiB", "10.0"
    )  # fmt: skip
    assert "other" in table.text([mine, other]) and "tiny" not in table.text([mine])


def test_means_by_length_and_by_depth(tmp_path):
    [run] = runs.read([finished(tmp_path / "a", "full", None, [1, 0, 0, 0, 0, 1])])
    means = places.by_length(run, METRIC)
    assert {length: mean.value for length, mean in means.items()} == {16: pytest.approx(1 / 3), 32: pytest.approx(1 / 3)}
    spread = 1.96 * np.std([1, 0, 0], ddof=1) / math.sqrt(3)
    assert means[16].low == pytest.approx(1 / 3 - spread) and means[16].high == pytest.approx(1 / 3 + spread)
    lengths, depths, heat = places.by_depth(run, METRIC)
    assert (lengths, depths) == ([16, 32], [0, 100])
    np.testing.assert_allclose(heat, [[0.5, 0.5], [0, 0]])
    [run] = runs.read([finished(tmp_path / "b", "full", None, [2.0, 1.0, 4.0], metric="nll")])
    assert places.by_length(run, ("hay", "nll,none"))[16].value == pytest.approx(math.exp(3))


def test_what_answers_took_is_recorded_by_task():
    pytest.importorskip("lm_eval")
    from icejax.evaluation.report import about

    answers, place = Answers(), dict(batch_size=4, device="cpu: cpu")
    for key, prompt, seconds, device, where in (
        ("a", 10, 0.5, 100, place),
        ("b", 30, 0.25, 300, place),
        ("c", 20, None, 200, place),
        ("other batch", 20, 9.0, 200, place | dict(batch_size=1)),
        ("other device", 20, 9.0, 200, place | dict(device="gpu")),
        ("earlier icejax", 20, 9.0, 200, {}),
        ("other task", 99, 9.0, 999, place),
    ):
        took = dict(
            prompt_tokens=prompt, new_tokens=4, tpot_s=seconds, device_kv_bytes=device, digest_bytes=7, host_kv_bytes=2 * device
        )
        answers.add(key, "", took | where)
    keys = {"a", "b", "c", "other batch", "other device", "earlier icejax"}
    assert about._took(SimpleNamespace(answers=answers, place=place), keys) == dict(
        answers=6,
        prompt_tokens=20,
        new_tokens=4,
        device_bytes=307,
        host_bytes=600,
        seconds_per_token=0.375,
        tokens_per_s=1 / 0.375,
    )


class Addresses(html.parser.HTMLParser):
    """Collects what a page would load, and its images."""

    def __init__(self):
        super().__init__()
        self.loaded, self.tags = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loaded += [value for name, value in attributes if name in ("src", "href", "srcset", "data", "action")]


def test_the_page_asks_no_host_and_escapes_names(tmp_path):
    pytest.importorskip("matplotlib")
    from icejax.evaluation.report import page

    for budget, values in ((64, [0, 0, 0, 0, 0, 1]), (256, [1, 0, 1, 1, 1, 1])):
        finished(tmp_path / f"clustered-{budget}", "clustered", budget, values, model=NAME)
    finished(tmp_path / "full", "full", None, [1] * 6, model=NAME)
    rows = page.write(tmp_path / "out", runs.read([tmp_path]), "full")
    text = (tmp_path / "out" / "report.html").read_text()
    addresses = Addresses()
    addresses.feed(text)
    assert addresses.tags.count("img") == 3  # costs, lengths, heat
    assert (
        all(address.startswith("data:image/svg+xml;base64,") for address in addresses.loaded) and "script" not in addresses.tags
    )
    assert "default-src 'none'" in text and "url(" not in text and "@import" not in text
    assert "<td>clustered 256</td>" in text and '<td class="lower">-0.8333</td>' in text
    lines = [json.loads(line) for line in (tmp_path / "out" / "report.jsonl").read_text().splitlines()]
    assert lines == rows and len(lines) == 3
    for name in ("report.html", "report.jsonl"):
        assert stat.S_IMODE((tmp_path / "out" / name).stat().st_mode) == 0o600


def test_folders_without_a_finished_run_are_named(tmp_path):
    with pytest.raises(InputError, match="has no results.json, nor has a folder in it"):
        runs.read([tmp_path])
    folder = finished(tmp_path / "a", "full", None, [1])
    (folder / "samples_hay.jsonl").unlink()
    with pytest.raises(InputError, match="has no samples_hay.jsonl"):
        runs.read([tmp_path])
    for damaged in ("", "[]", '{"results": 1}', '{"n-samples": {}, "results": {"a": 1}}', "\x00"):
        (folder / "results.json").write_text(damaged)
        with pytest.raises(InputError, match="scores that cannot be read"):
            runs.read([folder])
    (folder / "results.json").write_text(json.dumps({"results": {}, "n-samples": {}}))
    with pytest.raises(InputError, match="does not say which cache it scored"):
        runs.read([folder])
