"""`bench.compare --model`: true continuations decoded by policies, their figures, intervals and the page."""

import json

import jax
import numpy as np
import pytest

from bench import texts
from bench.compare import __main__ as compare
from bench.compare import cells, forced, forced_page, model, tuned
from bench.compare.forced import Adaptive, Asked, Forced
from bench.compare.text import Text
from icejax.cache.registry import Q8_0, Clustered, Full, Streaming
from icejax.engine.snapshot.fingerprint import weights_sum
from tests import tolerances
from tests.helpers import families

LENGTH, SINKS, WINDOW = 600, 4, 28
ROW = "llama-gqa"


@pytest.fixture(scope="module")
def theirs():
    return families.build(families.row(ROW))


@pytest.fixture(scope="module")
def ours(theirs, tmp_path_factory):
    return families.load(theirs, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def question():
    tokens = families.tokens(texts.LONGEST, seed=1)
    return texts.Question(tokens[:20], tokens[20:37])


@pytest.fixture(scope="module")
def asked(ours, question):
    return Asked.of(Text.read(ours, families.tokens(LENGTH - texts.LONGEST)), question)


def reference(theirs, tokens: list[int], steps: list[int], window: int | None) -> np.ndarray:
    """Returns transformers' logits after `steps` tokens behind an exact prefill; these see sinks, a window and themselves."""
    import torch

    cache, logits, given = None, [], [tokens, *([token] for token in steps)]
    for i, new in enumerate(given):
        seen = len(tokens) + i
        mask = torch.zeros(1, 1, len(new), seen)
        if i == 0:
            mask += torch.full((seen, seen), -torch.inf).triu(1)
        elif window is not None:
            mask[..., SINKS : seen - window] = -torch.inf
        with torch.no_grad():
            out = theirs(torch.tensor([new]), attention_mask=mask, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits[0, -1].double().numpy())
    return np.stack(logits[1:])


def test_logits_and_divergence_are_those_of_transformers(theirs, ours, asked, question):
    """The full cache has no divergence; sinks and window have transformers' under a mask."""
    before, steps = [*asked.before.tokens], question.continuation[:-1]
    exact = reference(theirs, before, steps, None)
    np.testing.assert_allclose(asked.logits[:-1], exact, rtol=0, atol=tolerances.LOGITS)
    full = Forced(ours, Full(), length=LENGTH).figures(asked)
    assert full["kl"] < 1e-9 and full["error"] < tolerances.EXACT and full["agreement"] == 1
    masked = reference(theirs, before, steps, WINDOW)
    streaming = Forced(ours, Streaming(budget=SINKS + WINDOW, reassign=False), length=LENGTH).figures(asked)
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (exact, masked))
    assert streaming["kl"] == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-3) and streaming["kl"] > 1e-3
    assert streaming["agreement"] == pytest.approx((exact.argmax(-1) == masked.argmax(-1)).mean(), abs=1e-4)
    assert streaming["attended"] == SINKS + WINDOW


def test_a_right_answer_has_every_token(ours, asked):
    """The continuation is replaced by the model's own greedy one, then by one whose last token differs."""
    text, tokens, question = asked.before, [asked.before.next], asked.before.tokens[asked.before.base :]
    while len(tokens) < 6:
        tokens.append(text.then([*question, *tokens]).next)
    base = Text.read(ours, text.tokens[: text.base])
    full = Forced(ours, Full(), length=LENGTH)
    for last, right in ((tokens[-1], 1), (tokens[-1] + 1, 0)):
        continuation = [*tokens[:-1], last]
        assert full.figures(Asked.of(base, texts.Question(question, continuation)))["right"] == right


def test_divergence_is_that_of_two_distributions():
    exact, other = np.log([[0.5, 0.5], [0.9, 0.1]]) + 3, np.log([[0.25, 0.75], [0.9, 0.1]]) - 7
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    np.testing.assert_allclose(forced.divergence(exact, other), [expected, 0], atol=1e-12)


def test_bytes_are_those_of_16_bits(ours, asked):
    config = ours.config
    per_layer = config.num_key_value_heads * config.head_dim
    full = Forced(ours, Full(), length=LENGTH)
    figures = full.figures(asked)
    capacity = full._plan.spec.capacity
    assert figures["device_bytes"] == config.num_hidden_layers * 2 * 2 * per_layer * capacity
    assert figures["host_bytes"] == figures["moved_bytes"] == 0
    clustered = Forced(ours, Clustered(budget=64, keys_first=False, dense_layers=0), length=LENGTH)
    figures = clustered.figures(asked)
    page = 2 * 2 * config.head_dim * 16
    pages = -(-768 // 16) + clustered._plan.growth_pages  # prompts of 600 tokens are padded to 768
    assert figures["host_bytes"] == config.num_hidden_layers * config.num_key_value_heads * page * -(-pages // 64) * 64
    layer = clustered._state.cache.layers[0]
    fetched = int(np.asarray(layer.fetched)[0]) * config.num_hidden_layers
    assert figures["moved_bytes"] == fetched * page
    assert figures["device_bytes"] < sum(x.nbytes for x in jax.tree.leaves(clustered._state.cache.layers))


@pytest.mark.parametrize("count", [20, 100])
def test_layers_with_a_window_attend_to_it(count, tmp_path):
    """Tokens behind a text of a model with sliding windows have the heads of one text, also more than it has room for."""
    gemma = families.load(families.build(families.row("gemma3_text-plain")), tmp_path)
    assert any(gemma.config.windows)
    tokens = families.tokens(130 + count)
    continued, whole = Text.read(gemma, tokens[:130]).then(tokens[130:]), Text.read(gemma, tokens)
    for (heads, attended), (other_heads, other) in zip(continued.behind, whole.layers, strict=True):
        for x, y in zip((*heads, attended.out), (*other_heads, other.out), strict=True):
            np.testing.assert_allclose(x[:, :count], y[:, 130 : 130 + count], rtol=0, atol=tolerances.LOGITS)
    assert Forced(gemma, Q8_0(), length=256).layers == [i for i, window in enumerate(gemma.config.windows) if window is None]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["topp", "vattention"])
def test_one_program_counts_the_tokens_of_every_value_of_an_option(name, ours, asked):
    """As many as policies attend to that have these values from the start."""
    (contender,), _ = cells.contenders([name], ["64"], LENGTH)
    adaptive = Adaptive(ours, None, LENGTH)
    vars(adaptive)["_asked"] = asked  # instead of a text of the standard library
    by_number, by_policy = adaptive._by_number(contender), adaptive._by_policy(contender)
    knob, counts = tuned.KNOBS[name], []
    for place in (knob.start, knob.start + 3):
        options = knob.options(place, 64)
        counts.append(by_number(options))
        assert counts[-1] == pytest.approx(by_policy(options), rel=1e-6)
    assert counts[0] < 0.9 * counts[1]


@pytest.fixture
def run(monkeypatch, ours, tmp_path):
    """Runs the command on a tiny model with random texts and returns its status."""

    def document(tokenizer, name, *, tokens, number):
        ids = families.tokens(texts.QUESTIONS * 20, seed=number)
        questions = (texts.Question(ids[i : i + 10], ids[i + 10 : i + 16]) for i in range(0, len(ids), 20))
        return texts.Document(families.tokens(tokens, seed=number), tuple(questions))

    monkeypatch.setattr(texts, "document", document)
    monkeypatch.setattr(model.panel, "readers", lambda *_, **__: iter([("tiny", ours, None)]))
    common = ["--model", "tiny", "--out", str(tmp_path / "run"), "--lengths", "600"]
    return lambda *arguments: compare.main([*common, *arguments])


@pytest.mark.slow
def test_a_stopped_run_goes_on_and_writes_the_page(run, tmp_path, monkeypatch, capsys):
    arguments = ("--policies", "full,streaming,quest,topp", "--budgets", "31,10%", "--questions", "4", "--tasks", "value")
    figures, calls = Forced.figures, []

    def failing(*figure_arguments):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return figures(*figure_arguments)

    searched = []
    monkeypatch.setattr(Forced, "figures", failing)
    monkeypatch.setattr(forced.tuned, "search", lambda knob, tokens, _: searched.append(tokens) or {knob.option: 0.75})
    with pytest.raises(KeyboardInterrupt):
        run(*arguments)
    path = tmp_path / "run" / model.LINES
    path.write_text(path.read_text()[:-20])  # the last line was cut off
    assert run(*arguments) == 0
    lines = forced.lines(path)
    # 4 questions of 2 texts: the full cache, streaming and topp with two budgets, quest with the larger one.
    assert len(lines) == 4 * 6 and len(calls) == 6 + 4 * 6 - 4 and searched == [31, 60]
    assert "quest, budget 31 of 600 tokens: left out: budget must be at least 32, got 31" in capsys.readouterr().err
    assert {(line["text"], line["question"]) for line in lines.values()} == {(0, 0), (0, 1), (0, 2), (1, 0)}
    page = (tmp_path / "run" / "compare-published.md").read_text()
    assert "## tiny, 600 tokens, 4 questions" in page and "`topp` at 31 mass=0.75" in page
    assert (tmp_path / "run" / "compare-published.png").read_bytes().startswith(b"\x89PNG")
    # Nothing runs again; `--page` writes the same page.
    assert run(*arguments) == 0 and len(calls) == 6 + 4 * 6 - 4
    first, _, others = path.read_text().partition("\n")
    path.write_text(json.dumps(json.loads(first) | dict(crc=0)) + "\n" + others)  # a line of another text
    assert run(*arguments) == 0 and len(calls) == 7 + 4 * 6 - 4
    (tmp_path / "run" / "compare-published.md").unlink()
    assert compare.main(["--page", "--out", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "compare-published.md").read_text() == page


def test_a_line_of_other_weights_counts_as_missing(ours, tmp_path, monkeypatch):
    """A line without a checksum of the weights, as older files have, counts by the model's name."""
    document = texts.Document([1], (texts.Question([2], [3]),))
    monkeypatch.setattr(texts, "document", lambda *_, **__: document)
    monkeypatch.setattr(forced.Text, "read", lambda *_: None)
    monkeypatch.setattr(Asked, "of", lambda *_: None)
    monkeypatch.setattr(Forced, "figures", lambda *_: dict.fromkeys(forced.FIGURES, 0.5))
    contenders, _ = cells.contenders(["full"], [], LENGTH)
    path, arguments = tmp_path / "lines", dict(lengths=[LENGTH], tasks=["value"], questions=1, contenders={LENGTH: contenders})

    def run() -> list[dict]:
        [*forced.run("tiny", ours, None, path=path, **arguments)]
        return [json.loads(text) for text in path.read_text().splitlines()]

    (first,) = run()
    assert first["weights"] == weights_sum(ours)
    older = {name: value for name, value in first.items() if name != "weights"}
    for old, added in ((first, []), (older, []), (first | dict(weights=first["weights"] ^ 1), [first])):
        path.write_text(json.dumps(old) + "\n")
        assert run() == [old, *added]


def test_options_of_other_weights_are_not_used_again():
    old = {(name, weights): dict(model=name, weights=weights) for name in "ab" for weights in (1, 2)} | {"c": dict(model="a")}
    assert [*cells.of_model(old, "a", 1)] == [("a", 1), "c"]


def line(task="value", text=0, question=0, policy="quest", **figures):
    values = dict.fromkeys(forced.FIGURES, 0.0) | figures
    key = dict(model="m", policy=policy, budget="64", length=1024, task=task, text=text, question=question)
    return key | values | dict(tokens=64, crc=0, options={})


def test_an_interval_is_that_of_texts():
    """Of many texts it is the normal one of text means; questions of one text do not narrow it."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(400)
    single = [line(text=i, kl=x) for i, x in enumerate(values)]
    low, high = forced_page.interval(single, "kl")
    half = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.15 * half)
    repeated = [x | dict(question=i) for x in single for i in range(3)]
    assert forced_page.interval(repeated, "kl") == pytest.approx((low, high))
    # Tasks keep their numbers of texts: their difference is not in the interval.
    tasks = [line(task, text=i, kl=float(task == "value")) for task in texts.TASKS for i in range(8)]
    assert forced_page.interval(tasks, "kl") == (0.5, 0.5)


def test_the_page_has_means_of_lines():
    lines = [line(text=i, error=0.1 * (i + 1), kl=0.002, agreement=0.5, right=float(i == 0)) for i in range(2)]
    lines += [line(policy="q8_0", device_bytes=3 * 2**20, moved_bytes=5 * 2**10), line("function", policy="q8_0", right=1.0)]
    rows = forced_page.rows_of(lines)
    by_policy = {row["policy"]: row for row in rows}
    assert by_policy["quest"]["error"] == pytest.approx(0.15) and by_policy["quest"]["value"] == (1, 2)
    assert by_policy["q8_0"]["function"] == (1, 1) and by_policy["q8_0"]["device_bytes"] == 1.5 * 2**20
    q8_0, quest = [text for text in forced_page._table(rows)][2:]
    assert q8_0.startswith("| `q8_0` | 64 |") and "| 1 of 1 | 0 of 1 | 1.5 | 0 | 2 | 2 |" in q8_0
    assert "0.1500 (0.1000-0.2000) | 0.000 | 2 (2-2) | 50.0% | - | 1 of 2 |" in quest
    assert "| 0.0000 | 0.000 | 0 | 0.0% |" in q8_0  # of one text: no interval


def test_the_page_compares_our_error_with_others():
    errors = [("clustered", "64", 0.02), ("topk", "64", 0.1), ("topk", "256", 0.04), ("q8_0", "all", 0.01)]
    lines = [line(policy=policy, error=error) | dict(budget=budget) for policy, budget, error in errors]
    *_, row = forced_page._shares(forced_page.rows_of(lines))
    assert row == "| m | 1,024 | `clustered` | 64 | 0.200 | 2.000 | - |"


def test_texts_of_all_tasks_come_in_groups_that_fit(ours, monkeypatch):
    config = ours.config
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
    text_bytes = 4 * heads * config.head_dim * config.num_hidden_layers * 600
    monkeypatch.setattr(forced, "TEXT_BYTES", 2 * text_bytes + 1)
    groups = list(forced.groups(ours, 600, texts.TASKS, 7))
    assert groups == [[("function", i), ("value", i)] for i in range(3)]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--model", "/nosuch"), "/nosuch: expected a checkpoint folder, a GGUF file or a hub id such as org/name, found no"),
        (("--model", "m", "--tasks", "hops"), "--tasks must be of function, value, got 'hops'"),
        (("--model", "m", "--lengths", "500"), "--lengths must be at least 576, got 500"),
        (("--model", "m", "--questions", "0"), "--questions must be at least 1, got 0"),
        (("--model", "m", "--budgets", "64", "--policies", "arkvale"), "--budgets must hold one that a policy can have"),
        (("--page",), "FOLDER/compare-published.jsonl must hold the lines of a comparison: it has none"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message, tmp_path, capsys):
    assert compare.main(["--out", str(tmp_path / "run"), *arguments]) == 2
    err = [text for text in capsys.readouterr().err.splitlines() if "left out" not in text]
    assert len(err) == 1 and err[0].startswith(f"bench.compare: error: {message.replace('FOLDER', str(tmp_path / 'run'))}")
