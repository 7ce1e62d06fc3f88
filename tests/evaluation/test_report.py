"""Reports on finished runs: pairs by the samples' names, rows, means by length and depth, and a page that asks no host."""

import html.parser
import json
import math
import stat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from icejax import load
from icejax.cache.registry import Full
from icejax.checks.errors import InputError
from icejax.evaluation.answers import Answers
from icejax.evaluation.paired import difference
from icejax.evaluation.report import places, runs, table
from icejax.evaluation.scores import Scores

METRIC = ("hay", "found,none")
ABOUT = dict(model="tiny", dtype="float32", device="cpu: cpu", versions=dict(icejax="0.1.0"), context_length=64)
NAME = "</title><script src=//host></script>"  # of a model


def finished(folder, cache, budget, values, *, metric="found", score=np.mean, higher=True, first=0, seconds=0.01, **record):
    """Writes a run with a sample for each value, at lengths 16 and 32 and depths 0 and 100 in turn; returns its folder.

    `score` makes the score of the values, `higher` says whether a higher one is better, and `record` goes into the record.
    """
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
        "results": {"hay": {"alias": "hay", f"{metric},none": float(score(values)), f"{metric}_stderr,none": 0.25}},
        "n-samples": {"hay": dict(original=len(values), effective=len(values))},
        "higher_is_better": {"hay": {metric: higher}},
        "icejax": ABOUT | dict(cache=cache, budget=budget, tasks=dict(hay=took)) | record,
        "samples": {"hay": samples},
    }
    Scores.of(results).save(folder)
    return folder


def test_scores_are_read_as_they_were_written(tmp_path):
    read = Scores.read(finished(tmp_path / "a", "full", None, [1, 0, 1]))
    assert read.totals == {METRIC: pytest.approx(2 / 3)} and read.errors == {METRIC: 0.25}
    assert read.samples == {METRIC: {"0 d0 p": 1, "1 d1 p": 0, "2 d2 p": 1}}
    assert read.higher_is_better == {METRIC: True}
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
        "hay", "found", "clustered 64", "0.5000 ± 0.2500", "4", "-0.3333", f"{mine['low']:+.4f} to {mine['high']:+.4f}", "full", "2.0 MiB", "1.0 MiB", "10.0"
    )  # fmt: skip
    assert "other" in table.text([mine, other]) and "tiny" not in table.text([mine])


@pytest.mark.parametrize("higher, up, down", [(True, "better", "worse"), (False, "worse", "better"), (None, "", "")])
def test_a_difference_has_the_colour_of_its_metrics_direction(tmp_path, higher, up, down):
    pytest.importorskip("matplotlib")
    from icejax.evaluation.report import page

    for cache, values in (("full", [1, 2, 1]), ("h2o", [2, 3, 2])):
        finished(tmp_path / cache, cache, None, values, metric="nll", higher=higher)
    several = runs.read([tmp_path])
    for against, number, expected, side in (("full", 1, 1, up), ("h2o", 0, -1, down)):
        row = runs.rows(several, against)[number]
        assert (row["difference"], row["higher_is_better"]) == (expected, higher)
        assert page._cells(row)["side"] == side


def test_a_score_that_is_not_the_mean_of_its_samples_has_no_difference(tmp_path):
    metrics = pytest.importorskip("lm_eval.api.metrics")
    for cache, values in (("full", [-1.0, -2.0]), ("h2o", [-2.0, -3.0])):  # log-likelihoods, as lambada's
        finished(tmp_path / cache, cache, None, values, metric="perplexity", score=metrics.perplexity, higher=False)
    full, h2o = runs.rows(runs.read([tmp_path]), "full")
    assert (full["score"], h2o["score"]) == (pytest.approx(math.exp(1.5)), pytest.approx(math.exp(2.5)))
    assert "difference" not in h2o and table.cells(h2o)[5:8] == ("", "", "")


def test_a_cache_is_compared_with_the_run_of_a_folder_or_the_first_of_a_name(tmp_path):
    budgets = {64: [0, 0], 256: [1, 0]}
    folders = [finished(tmp_path / str(budget), "clustered", budget, values) for budget, values in budgets.items()]
    less, more = runs.rows(runs.read(folders), folders[1])
    assert (less["difference"], less["against"]) == (-0.5, "clustered 256") and "difference" not in more
    less, more = runs.rows(runs.read(folders), "clustered")
    assert (more["difference"], more["against"]) == (0.5, "clustered 64") and "difference" not in less


OTHERS = dict(weights=2, quantize="int8", dtype="bfloat16", context_length=99, chat=True, system="x", model="other")


@pytest.mark.parametrize("name", OTHERS)
def test_runs_are_compared_with_one_of_the_same_weights_and_settings(tmp_path, name):
    other = {name: OTHERS[name]}
    record = dict(weights=1, quantize=None, chat=False, system=None)
    for folder, value, more in (("a", 1, {}), ("b", 0, other), ("c", 0, {})):
        finished(tmp_path / folder / "full", "full", None, [value], **record | more)
    for folder, more in (("a", {}), ("b", other), ("c", {}), ("d", {})):
        finished(tmp_path / folder / "h2o", "h2o", None, [1], **record | more)

    def differences(folders):
        rows = runs.rows(runs.read([tmp_path / folder for folder in folders]), "full")
        return {Path(row["folder"]).parent.name: row.get("difference") for row in rows if row["cache"] == "h2o"}

    assert differences("abcd") == dict(a=0, b=1, c=1, d=0)  # d has no full cache, and a's is the first
    assert differences("bd") == dict(b=1, d=None)


@pytest.mark.slow
def test_the_record_of_a_run_tells_weights_apart(bundled):
    pytest.importorskip("lm_eval")
    from icejax.evaluation.report import about

    def record(model, **options):
        run = SimpleNamespace(model=model, cache=Full(), tokenizer=bundled[1], max_length=64, place={}, asked={})
        return about.about(run, "tiny", chat=True, **options)

    plain, again = (record(model, system="x", quantize=None) for model in (bundled[0], load()[0]))
    rounded = record(load(quantize="int8")[0], system=None, quantize="int8")
    assert {name: plain[name] for name in runs.SAME if name != "weights"} == dict(
        model="tiny", quantize=None, dtype=bundled[0].dtype, context_length=64, chat=True, system="x"
    )
    assert rounded["quantize"] == "int8" and rounded["weights"] != plain["weights"] == again["weights"]


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
    assert "<td>clustered 256</td>" in text and '<td class="worse">-0.8333</td>' in text
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
