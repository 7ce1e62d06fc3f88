"""`bench.compare`: captured attention, the errors of policies on it, resumed runs, tuned budgets, tables and plots."""

import json
import types

import jax
import numpy as np
import pytest

from bench.compare import __main__ as compare
from bench.compare import cells, page, picture, rows, tuned
from bench.compare.runner import Runner
from bench.compare.subject import STEPS, Subject
from bench.compare.text import Text
from icejax.cache.options import make_policy
from icejax.cache.registry import Clustered, Full, Quest, SnapKV, Streaming
from icejax.engine.prefill import prefill
from tests import tolerances
from tests.helpers import families
from tests.helpers.layer import attention

PROMPT, MORE, ROOM = 150, 9, 64


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return families.load(families.build(families.row("llama-gqa")), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def texts(model):
    """A text, that text continued by MORE tokens, and all the tokens read as one text."""
    tokens = families.tokens(PROMPT + MORE)
    text = Text.read(model, tokens[:PROMPT])
    return text, text.then(tokens[PROMPT:]), Text.read(model, tokens)


def subject(model, policy) -> Subject:
    return Subject(model, policy, prompt_tokens=PROMPT + ROOM, new_tokens=ROOM)


def test_tokens_behind_a_text_have_the_heads_of_one_text(texts):
    _, continued, expected = texts
    assert continued.tokens == expected.tokens and continued.next == expected.next and continued.base == PROMPT
    for layers, first, last in ((continued.layers, 0, PROMPT), (continued.behind, PROMPT, PROMPT + MORE)):
        for layer, expected_layer in zip(layers, expected.layers, strict=True):
            for actual, reference in zip(jax.tree.leaves(layer), jax.tree.leaves(expected_layer), strict=True):
                np.testing.assert_allclose(actual[:, : last - first], reference[:, first:last], rtol=0, atol=tolerances.LOGITS)


@pytest.mark.parametrize("policy", [Full(), Clustered(budget=64), SnapKV(budget=64)], ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("which", ["the text", "tokens behind it"])
def test_a_policy_keeps_of_a_text_what_it_keeps_of_a_prompt(model, texts, policy, which):
    text = texts[which != "the text"]
    replay = subject(model, policy)
    replay.take(text)
    state, step, _ = prefill(model, [text.tokens], replay._plan)
    assert int(step.tokens[0]) == text.next
    for x, y in zip(jax.tree.leaves(replay._state.cache.layers), jax.tree.leaves(state.cache.layers), strict=True):
        # The widths of page digests are sums of squares in the hundreds.
        np.testing.assert_allclose(x, y, rtol=tolerances.EXACT, atol=tolerances.LOGITS)


def test_errors_are_those_of_attention_to_what_is_kept(model, texts):
    """The full cache has no error; sinks and window have the float64 error, per head and over all heads."""
    text, longer, _ = texts
    full = subject(model, Full())
    full.take(text)
    measured = full.measure(longer)
    assert measured.errors.shape == (STEPS, 3, 4) and measured.errors.max() < tolerances.EXACT
    assert (measured.tokens == np.arange(PROMPT + 1, PROMPT + 1 + STEPS)[:, None, None]).all()
    streaming = subject(model, Streaming(budget=32, reassign=False))
    streaming.take(text)
    measured = streaming.measure(longer)
    for step in range(STEPS):
        newest = PROMPT + step
        for i, (((q, k, v), _), (behind, _)) in enumerate(zip(longer.layers, longer.behind, strict=True)):
            q, k, v = (np.concatenate([x[0, :PROMPT], y[0]]).astype(np.float64) for x, y in zip((q, k, v), behind, strict=True))
            held = [*range(4), *range(newest - 27, newest + 1)]
            out, exact = (attention(q[newest], x, y) for x, y in ((k[held], v[held]), (k[: newest + 1], v[: newest + 1])))
            expected = np.linalg.norm(out - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
            np.testing.assert_allclose(measured.errors[step, i], expected, rtol=1e-3)
            np.testing.assert_allclose(measured.whole[step, i], np.linalg.norm(out - exact) / np.linalg.norm(exact), rtol=1e-3)
    assert (measured.tokens == 32).all()


def test_choices_per_query_head_are_counted_for_each_and_all(model, texts):
    text, longer, _ = texts
    quest = subject(model, Quest(budget=64, page_size=16))
    quest.take(text)
    # A window of 1 to 16 tokens, and three pages for each of two heads.
    single, union = np.moveaxis(quest.measure(longer).tokens, -1, 0)
    assert 1 + 2 * 16 < single.min() and single.max() <= 64 and (single <= union).all() and union.max() > single.max()


@pytest.fixture
def run(monkeypatch, model, tmp_path):
    """Runs the command on a tiny model and returns its status."""
    monkeypatch.setattr(compare.panel, "models", lambda **_: iter([("tiny", model)]))
    monkeypatch.setattr(cells.Cell, "draw", lambda self, number: (families.tokens(600, seed=number), [([1, 2, 3], [4, 5, 6])]))

    common = ["--out", str(tmp_path / "run"), "--lengths", "600", "--questions", "2", "--tasks", "single"]
    return lambda *arguments: compare.main([*common, *arguments])


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_and_makes_table_and_plot(run, tmp_path, monkeypatch, capsys):
    arguments = ("--policies", "full,streaming,quest", "--budgets", "31,10%")
    read, calls = cells.read, []

    def failing(*read_arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return read(*read_arguments)

    monkeypatch.setattr(cells, "read", failing)
    with pytest.raises(KeyboardInterrupt):
        run(*arguments)
    path = tmp_path / "run" / "lines.jsonl"
    path.write_text(path.read_text()[:-20])  # the last line was cut off
    status, lines = run(*arguments), cells.lines(path)
    # 2 texts x 2 protocols x 4: the full cache, streaming with two budgets, quest with the larger one.
    assert status == 0 and len(lines) == 2 * 2 * 4 and len(calls) == 4 + 16 - 2
    assert "quest, budget 31 of 600 tokens: left out: budget must be at least 32, got 31" in capsys.readouterr().err
    table = [json.loads(line) for line in (tmp_path / "run" / "compare.jsonl").read_text().splitlines()]
    assert {(r["policy"], r["budget"], r["tokens"]) for r in table} == {
        ("full", "all", None), ("streaming", "31", 31), ("streaming", "10%", 60), ("quest", "10%", 60),
    }  # fmt: skip
    assert all(r["questions"] == 2 and r["texts"] == 2 and 0 <= r["low"] <= r["exact"] <= r["high"] <= 1 for r in table)
    by_key = {(r["policy"], r["budget"], r["protocol"]): r for r in table}
    for protocol in ("dense", "sparse"):
        assert by_key["full", "all", protocol]["error"] < 1e-5 < by_key["streaming", "10%", protocol]["error"]
        assert by_key["streaming", "31", protocol]["attended"] == 31 and by_key["quest", "10%", protocol]["moved_bytes"] > 0
    assert (tmp_path / "run" / "compare.png").read_bytes().startswith(b"\x89PNG")
    # A complete row is kept without its lines; an incomplete row is computed again.
    path.unlink()
    assert "## tiny, single, 600 tokens, 2 questions" in (tmp_path / "run" / "compare-tables.md").read_text()
    incomplete = [r | dict(error=7.0) for r in table if r["policy"] != "quest"]
    rows.write(tmp_path / "run" / "compare.jsonl", rows.lines_of(incomplete))
    assert run(*arguments) == 0 and len(cells.lines(path)) == 4
    resumed = rows.read(tmp_path / "run" / "compare.jsonl")
    assert len(resumed) == len(table) and all((row["error"] == 7) == (row["policy"] != "quest") for row in resumed.values())


def test_a_row_of_fewer_questions_takes_no_other_s_place(run, tmp_path, monkeypatch):
    """Lines may be of a text that was asked fewer questions, of an interrupted run, or deleted."""
    draw_questions = lambda self, number: ([], [([1], [2])] * min(4, self.questions - 4 * number))  # noqa: E731
    monkeypatch.setattr(cells.Cell, "draw", draw_questions)
    texts, interrupted_at = [], []

    def line(self, cell, number, subject, protocol):
        texts.append(number)
        if (cell.task, number) in interrupted_at:
            raise KeyboardInterrupt
        num_asked = len(cell.draw(number)[1])
        return dict(asked=num_asked, right=num_asked, options={}) | dict.fromkeys(rows.MEANS, 1.0)

    monkeypatch.setattr(Runner, "line", line)
    monkeypatch.setattr(picture, "draw", lambda *_: None)
    path = tmp_path / "run" / "lines.jsonl"

    def questions(*arguments: str) -> int:
        assert run("--policies", "full", "--protocols", "dense", *arguments) == 0
        table = rows.read(tmp_path / "run" / "compare.jsonl")
        return table["tiny", "full", "all", 600, "multikey-4", "dense"]["questions"]

    two_questions, six_questions, nine_questions = (("--tasks", "multikey-4", "--questions", n) for n in ("2", "6", "9"))
    assert questions(*two_questions) == 2 and texts == [0]
    assert questions(*six_questions) == 6 and texts == [0, 0, 1]  # text 0 had been asked two of its four questions
    path.unlink()
    assert questions(*two_questions) == 6 and len(texts) == 3
    interrupted_at.append(("multikey-4", 1))
    with pytest.raises(KeyboardInterrupt):
        questions(*nine_questions)
    assert len(cells.lines(path)) == 1 and questions("--tasks", "single") == 6
    interrupted_at.clear()
    assert questions(*nine_questions) == 9


@pytest.mark.slow
@pytest.mark.parametrize("left", ["lines.jsonl", "compare.jsonl"])
def test_options_are_searched_for_once(run, tmp_path, monkeypatch, left):
    """Another task or a resumed run does not search again, whether lines or rows are left."""
    searched_budgets = []
    monkeypatch.setattr(tuned, "search", lambda knob, tokens, _: searched_budgets.append(tokens) or {knob.option: 0.75})
    arguments = ("--policies", "topp", "--budgets", "32,64", "--protocols", "sparse")
    assert run(*arguments) == 0 and searched_budgets == [32, 64]
    for name in {"lines.jsonl", "compare.jsonl"} - {left}:
        (tmp_path / "run" / name).unlink()
    assert run(*arguments, "--tasks", "multikey-4") == 0 and searched_budgets == [32, 64]
    table_rows = rows.read(tmp_path / "run" / "compare.jsonl").values()
    assert len(table_rows) == 4 and all(row["options"] == {"mass": 0.75} for row in table_rows)


def test_options_of_a_policy_stand_behind_its_name():
    (contender,), left_out = cells.contenders(["clustered:candidates=1:tail=false"], ["64"], 600)
    assert (contender.name, contender.policy) == ("clustered:candidates=1:tail=false", Clustered(64, candidates=1, tail=False))
    assert not left_out


def test_rocketkv_keeps_as_much_of_a_text_as_its_length_asks_for():
    """RocketKV counts these budgets as 1/32 and 1/16 of the text, and first keeps 1/32^0.5 and 1/16^0.44 of it."""
    contenders, _ = cells.contenders(["rocketkv", "rocketkv:kept=300"], ["64", "128"], 4096)
    assert [contender.policy.kept for contender in contenders] == [724, 1209, 300, 300]


def test_what_is_no_line_is_passed_over(tmp_path):
    line = dict.fromkeys(cells.COLUMNS, 1)
    texts = [b"5", b"\xff", b'{"model": "m"}', json.dumps(line).encode(), json.dumps(line).encode()[:-9]]
    (tmp_path / "lines.jsonl").write_bytes(b"\n".join(texts))
    assert list(cells.lines(tmp_path / "lines.jsonl").values()) == [line]


def test_question_through_the_cache_counts_in_ttft():
    """In the dense protocol the first token comes from the prefill. The times are powers of two, so each sum is unique."""
    measured = types.SimpleNamespace(errors=np.ones((2, 3, 4)), whole=np.ones((2, 3)), tokens=np.ones((2, 3, 2)))
    timings = dict(dense=([8, 9], 16.0, [32.0, 64.0], 7.0), sparse=([7, 8, 9], 16.0, [32.0, 64.0, 128.0], 7.0))
    text, continued = types.SimpleNamespace(seconds=1.0), types.SimpleNamespace(seconds=2.0, next=7)
    question = cells.Question([1, 2], [7, 8, 9], continued, None)
    for protocol, first, step in (("dense", 2 + 4, 48), ("sparse", 1 + 4 + 16, 64)):
        subject = types.SimpleNamespace(
            take=lambda _: None, measure=lambda _: measured, kept_s=4.0, sizes=dict, timed=lambda *_, p=protocol: timings[p]
        )
        line = cells.read(subject, text, [question], protocol)
        assert (line["right"], line["first_token_s"], line["tpot_s"]) == (1, first, step)


def test_answers_and_costs_of_texts_are_summed():
    base = dict(zip(rows.KEY, ("m", "p", "64", 600, "single", "dense"), strict=True)) | dict.fromkeys(rows.MEANS, 1.0)
    base |= dict(tokens=64, options={}, device="cpu: cpu", jax="0.11")
    (row,) = rows.summed([base | dict(asked=4, right=3, error=0.2), base | dict(asked=1, right=1, error=0.4)]).values()
    assert (row["questions"], row["exact"], row["error"], row["texts"]) == (5, 0.8, 0.3, 2)


def test_times_are_those_of_another_run():
    base = dict(zip(rows.KEY, ("m", "p", "64", 600, "single", "dense"), strict=True)) | dict.fromkeys(rows.TIMES, 9.0)
    source = [base | dict(protocol=protocol, tpot_s=x) for protocol, x in (("dense", 1.0), ("sparse", 2.0))]
    timed = rows.timed([base | dict(task="hops"), base | dict(budget="256")], {rows.key_of(row): row for row in source})
    assert [row["tpot_s"] for row in timed] == [1.5, None] and timed[1]["first_token_s"] is None


@pytest.mark.parametrize("tokens", [64, 300])
@pytest.mark.parametrize("name", tuned.KNOBS)
def test_an_option_is_searched_for_until_the_mean_is_the_budget(name, tokens):
    """For a method that attends to more tokens as the option grows or shrinks; integer options change in steps."""
    knob, tried_values = tuned.KNOBS[name], []

    def attended(options: dict) -> float:
        make_policy(name, options)
        value = options[knob.option]
        tried_values.append(value)
        return {"topp": 4000 * value**3, "magicpig": 20 + 900 * value / (300 + value), "vattention": 30 + 4 / value}[name]

    options = tuned.search(knob, tokens, attended)
    assert len(tried_values) <= 6
    if name == "magicpig":  # hash tables cost memory and time
        assert max(tried_values) < 2 * max(192, options["tables"])
    assert abs(attended(options) / tokens - 1) < tuned.CLOSE


def test_a_budget_out_of_reach_is_missed_by_as_little_as_can_be():
    options = tuned.search(tuned.KNOBS["magicpig"], 256, lambda options: options["tables"] / 20)
    assert options == dict(tables=2048, budget=512)


@pytest.mark.slow
def test_an_adaptive_method_attends_to_its_budget_in_the_mean(run, tmp_path):
    assert run("--policies", "topp,vattention", "--budgets", "64") == 0
    table_rows = rows.read(tmp_path / "run" / "compare.jsonl").values()
    assert len(table_rows) == 4
    for row in table_rows:
        assert row["tokens"] == 64 and row["attended"] == pytest.approx(64, rel=0.3) and row["options"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--policies", "nothing"), "unknown cache 'nothing'"),
        (("--policies", "quest:sink=1"), "cache 'quest' has no option 'sink'"),
        (("--policies", "clustered:tail"), "cache option tail must be bool, got ''"),
        (("--budgets", "few"), "--budgets must be numbers of tokens or shares such as 10%, got 'few'"),
        (("--lengths", "100"), "--lengths must be at least 512, got 100"),
        (("--lengths", "x"), "--lengths must be whole numbers, comma-separated, got 'x'"),
        (
            ("--tasks", "early"),
            "--tasks must be of single, multikey-4, multikey-8, multikey-16, multivalue-4, hops, got 'early'",
        ),
        (("--questions", "1"), "--questions must be at least 2, got 1"),
        (("--budgets", "abc", "--policies", "full"), "--budgets must be numbers of tokens or shares such as 10%, got 'abc'"),
        (("--policies", "quest:budget=64"), "--policies must leave the budget to --budgets, got quest:budget=64"),
        (
            ("--budgets", "64", "--policies", "arkvale", "--lengths", "600"),
            "--budgets must hold one that a policy can have: arkvale, budget 64 of 600 tokens: left out: budget must be at least 160",
        ),
        (("--protocols", "both"), "--protocols must be of dense, sparse, got 'both'"),
        (("--models", "mha"), "--models must be of bundled, got 'mha'"),
        (("--times", "nowhere"), "nowhere must hold the rows of a comparison: [Errno 2] No such file or directory: 'nowhere'"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message, tmp_path, capsys):
    assert compare.main(["--out", str(tmp_path / "run"), *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"bench.compare: error: {message}") and err.count("\n") == 1 and not (tmp_path / "run").exists()


def test_plot_shows_policies_where_full_cache_answers():
    def row(policy, task, exact=1.0):
        return dict(policy=policy, model="m", length=1, task=task, protocol="dense", exact=exact)

    easy, few_policies = [row("full", "easy"), row("a", "easy")], [row("full", "few"), row("full:x=1", "few")]
    unknown = [row(name, "unknown", exact=0.4) for name in ("full", "a", "b")]
    assert picture.alike([*few_policies, *unknown, *easy]) == easy and picture.alike([]) == []
    assert picture.alike([row("a", "x", 0.0), row("b", "x", 0.0), row("a", "y")]) == [row("a", "x", 0.0), row("b", "x", 0.0)]
    longer = [row(name, "x") | dict(length=2) for name in ("full", "a")]
    other_model = [row(name, task) | dict(model="n") for task in ("x", "y") for name in ("full", "a")]
    tasks = [row(name, task) for task in ("x", "y") for name in ("full", "a")]
    assert picture.alike([*easy, *longer]) == longer and picture.alike([*longer, *other_model]) == other_model
    assert picture.alike([*tasks, *tasks, row("full", "z"), row("a", "z")]) == [*tasks, *tasks]  # z has one budget of two
    assert picture.alike([*tasks, row("a:z=1", "x")]) == tasks  # a mean over fewer tasks is not comparable


def test_the_page_says_how_far_ours_are_ahead():
    """A cell without a policy that all other cells have is left out."""

    def row(policy, error, task="x", budget="64", model="m"):
        cell_key = dict(model=model, length=1024, task=task, protocol="dense", budget=budget, questions=1, options={})
        sizes = dict(attended=1, device_bytes=1, moved_bytes=1, exact=1.0)
        return dict(policy=policy, tokens={"64": 64, "10%": 102}[budget], error=error) | cell_key | sizes

    def cell(clustered, coded, topk, quest, **cell_key):
        errors = dict(clustered=clustered, coded=coded, topk=topk, quest=quest, tolerant=0.001) | {"quest:page_size=8": 0.001}
        return [row(name, error, **cell_key) for name, error in errors.items()]

    page_rows = [
        *cell(0.1, 0.2, 0.6, 0.5),
        *cell(0.2, 0.1, 0.1, 0.5, task="y"),
        row("topk", 0.1, task="z"),
        row("quest", 9.0, task="z"),
    ]
    page_rows += cell(0.1, 0.1, 0.2, 0.3, model="bundled", budget="10%")
    table = page.rendered(page_rows).split("## ")[1]
    assert table.startswith("The best of all others\n")
    assert table.splitlines()[7:] == [
        "| bundled | 1,024 | 10% | 2.0 to 2.0 | 2.0 to 2.0 | `topk` |",
        "| m | 1,024 | 64 | 0.5 to 5.0 | 1.0 to 2.5 | `quest`, `topk` |",
        "",
    ]


def test_page_ranks_behind_oracles_with_models_side_by_side():
    def row(policy, budget, protocol, exact, error, model="bundled", task="hops", options=None):
        tokens = {"all": None, "10%": 410}.get(budget, 64)
        sizes = dict(attended=tokens or 4106, device_bytes=2**20 * len(policy), moved_bytes=0.0)
        cell_key = dict(model=model, length=4106, task=task, protocol=protocol, questions=50, options=options or {})
        return dict(policy=policy, budget=budget, tokens=tokens, exact=exact, error=error) | cell_key | sizes

    page_rows = [
        row("full", "all", "sparse", 0.5, 0.0), row("full", "all", "dense", 1.0, 0.0),
        row("b", "10%", "sparse", 0.5, 0.5), row("b", "10%", "dense", 0.0, 0.5), row("b", "64", "dense", 1.0, 0.125),
        row("c", "10%", "dense", 1.0, 0.25, options={"mass": 0.123456}), row("topk", "10%", "dense", 0.0, 1.0),
        row("a", "10%", "dense", 1.0, 0.5), row("a", "10%", "dense", 0.25, 1.0, model="mha", task="single"),
    ]  # fmt: skip
    tables = page.rendered(page_rows).split("## ")
    assert [text.splitlines()[0] for text in tables[1:]] == [
        "bundled, hops, 4,106 tokens, 50 questions", "mha, single, 4,106 tokens, 50 questions",
        "All models, 4,106 tokens, budget 10%",
    ]  # fmt: skip
    assert tables[1].splitlines()[4:] == [
        "| `full` | 100%, 50% | 0.000, 0.000 | 100%, 50% | 0.000, 0.000 | 4106 | 4.0 | 0 |",
        "| `topk` |  |  | 0% | 1.000 | 410 | 4.0 | 0 |",
        "| `c` |  |  | 100% | 0.250 | 410 | 1.0 | 0 |",
        "| `a` |  |  | 100% | 0.500 | 410 | 1.0 | 0 |",
        "| `b` | 100% | 0.125 | 0%, 50% | 0.500, 0.500 | 64 / 410 | 1.0 | 0 |",
        "", "Options found by a search on a text outside the tables: `c` at 10% mass=0.1235.", "",
    ]  # fmt: skip
    assert tables[3].splitlines()[4:] == [
        "|  | bundled: right, % | error | mha: right, % | error |",
        "|---|---|---|---|---|",
        "| `full` | 100 -, 50 - | 0.000, 0.000 |  |  |",
        "| `topk` | 0 - | 1.000 |  |  |",
        "| `c` | 100 - | 0.250 |  |  |",
        "| `a` | 100 - | 0.500 | - 25 | 1.000 |",
        "| `b` | 0 -, 50 - | 0.500, 0.500 |  |  |",
    ]
