"""`bench.compounding`: texts forced and written, against transformers; moved tokens, random pages, lines and the page."""

import json

import jax
import numpy as np
import pytest

from bench import texts
from bench.compounding import __main__ as compounding
from bench.compounding import page, policies, rows
from bench.compounding.policies import Misplaced, RandomPages, moved
from bench.compounding.steps import BIN, Prompt, Stepwise, binned
from icejax.cache.registry import POLICIES, Clustered, Full, Streaming
from icejax.engine.snapshot.fingerprint import weights_sum
from tests import tolerances
from tests.helpers import families

LENGTH, STEPS, SINKS = 600, 2 * BIN, 4
ROW = "llama-gqa"


@pytest.fixture(scope="module")
def theirs():
    return families.build(families.row(ROW))


@pytest.fixture(scope="module")
def ours(theirs, tmp_path_factory):
    return families.load(theirs, tmp_path_factory.mktemp("model"))


def document(tokenizer, length, seed):
    """Returns a random text with a question behind it."""
    ids = families.tokens(length, seed=seed)
    return texts.Document(ids[:-20], (texts.Question(ids[-20:], []),))


@pytest.fixture(scope="module")
def prompt(ours):
    return Prompt.read(ours, document(None, LENGTH, 0))


@pytest.fixture(scope="module")
def reference(ours, prompt):
    """Returns the full cache's text and the figures of its row."""
    return subject(ours, Full()).reference(prompt, STEPS)


def subject(model, policy):
    return Stepwise(model, policy, length=LENGTH, steps=STEPS)


def along(theirs, prompt: list[int], given: list[int], window: int | None) -> tuple[list[int], np.ndarray]:
    """Returns transformers' tokens behind an exact prefill, and the logits that each is chosen from.

    The tokens are those `given`, then its own greedy ones; each sees sinks, a window and itself.
    """
    import torch

    cache, tokens, logits, new = None, [], [], prompt
    for step in range(1 + STEPS):
        seen = len(prompt) + step
        mask = torch.zeros(1, 1, len(new), seen)
        if step == 0:
            mask += torch.full((seen, seen), -torch.inf).triu(1)
        elif window is not None:
            mask[..., SINKS : seen - window] = -torch.inf
        with torch.no_grad():
            out = theirs(torch.tensor([new]), attention_mask=mask, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits[0, -1].double().numpy())
        tokens.append(given[step] if step < len(given) else int(logits[-1].argmax()))
        new = tokens[-1:]
    return tokens, np.stack(logits)[1:]


def kl_of(exact: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the KL divergence of each step, averaged in bins."""
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (exact, other))
    return (np.exp(p) * (p - q)).sum(-1).reshape(-1, BIN).mean(1)


def test_the_full_cache_writes_transformers_text_without_error(theirs, prompt, reference):
    asked, figures = reference
    tokens, exact = along(theirs, prompt.before.tokens, [], None)
    assert asked.continuation == tokens and len(tokens) == 1 + STEPS
    np.testing.assert_allclose(asked.logits[:-1], exact, rtol=0, atol=tolerances.LOGITS)
    assert max(figures["kl"]) < 1e-9 and figures["error"] < tolerances.EXACT
    assert figures["agreement"] == figures["own_agreement"] == [1.0, 1.0] and figures["equal"] == 1.0
    assert figures["diverged"] is figures["moved"] is figures["same"] is None


@pytest.mark.parametrize("window", [28, 500])
def test_a_policy_is_forced_and_writes_on_as_transformers_under_a_mask(window, theirs, ours, prompt, reference):
    tokens, exact = along(theirs, prompt.before.tokens, [], None)
    _, followed = along(theirs, prompt.before.tokens, tokens, window)
    own, written = along(theirs, prompt.before.tokens, [], window)
    _, exact_of_own = along(theirs, prompt.before.tokens, own, None)
    figures = subject(ours, Streaming(budget=SINKS + window, reassign=False)).follow(prompt, reference[0])
    np.testing.assert_allclose(figures["kl"], kl_of(exact, followed), rtol=2e-3)
    np.testing.assert_allclose(figures["own_kl"], kl_of(exact_of_own, written), rtol=2e-3)
    assert figures["agreement"] == binned(exact.argmax(-1) == followed.argmax(-1))
    assert figures["own_agreement"] == binned(exact_of_own.argmax(-1) == own[1:])
    differing = np.flatnonzero(np.not_equal(own, tokens))
    assert figures["diverged"] == differing[0] and figures["equal"] == pytest.approx(1 - len(differing) / STEPS, abs=1e-4)


def test_a_share_of_tokens_moves_in_a_cycle():
    order = jax.random.permutation(jax.random.key(1), np.arange(64)[None, None].repeat(2, 1), axis=2, independent=True)
    filled = np.arange(64)[None, None].repeat(2, 1) < 50
    for share, count in ((0.0, 0), (0.05, 3), (0.2, 10), (1.0, 50)):
        new = np.asarray(moved(order, filled, share, jax.random.key(0)))
        assert ((new != order).sum(2) == count).all() and (new[..., 50:] == order[..., 50:]).all()
        assert (np.sort(new, axis=2) == np.arange(64)).all()
        if count:
            assert (new[0, 0] == order[0, 0]).tolist() != (new[0, 1] == order[0, 1]).tolist() or share == 1
            assert (new != np.asarray(moved(order, filled, share, jax.random.key(2)))).any()


def test_moved_tokens_cost_what_they_are(ours, prompt, reference):
    """No token moved is the plain cache; pages of random tokens have other digests."""
    plain, none, all_of_them = (
        subject(ours, policy).follow(prompt, reference[0])
        for policy in (Clustered(budget=64), Misplaced(budget=64), Misplaced(budget=64, share=1.0))
    )
    assert plain == none and plain["kl"] != all_of_them["kl"] and plain["error"] != all_of_them["error"]


def test_random_pages_are_as_many_as_the_budget_holds(ours, prompt, reference):
    few, every = (subject(ours, RandomPages(budget=budget)).follow(prompt, reference[0]) for budget in (64, 1024))
    pages = -(-(LENGTH - 8 - 24) // 16)  # beside sinks and window of a budget of 64
    assert few["moved"] == few["moved_95"] == 2 and few["same"] == pytest.approx(2 / pages, abs=0.03)
    # Beside 32 sinks and a window of 32, 34 pages hold the prompt's other tokens.
    assert 33 <= every["moved"] <= 36 and every["same"] > 0.99 and max(every["kl"]) < 1e-9
    assert few["error"] > 1000 * every["error"]
    assert few != subject(ours, RandomPages(budget=64, seed=1)).follow(prompt, reference[0])


def test_names_are_known_only_while_they_are_read():
    found, left_out = policies.contenders(["misplaced:share=0.05:page_size=8", "random-pages"], ["64", "16"], LENGTH)
    assert [x.policy for x in found] == [Misplaced(budget=64, share=0.05, page_size=8), RandomPages(budget=64)]
    assert len(left_out) == 2 and POLICIES.keys().isdisjoint(policies.KINDS)
    assert policies.seeded(found[0].policy, 3) == Misplaced(budget=64, share=0.05, page_size=8, seed=3)
    assert policies.seeded(Full(), 3) == Full()


@pytest.fixture
def run(monkeypatch, ours, tmp_path):
    """Runs the command on a tiny model with random texts, and returns its status."""
    monkeypatch.setattr(rows, "document", document)
    monkeypatch.setattr(compounding.panel, "readers", lambda *_, **__: iter([("tiny", ours, None)]))
    common = ["--out", str(tmp_path / "run"), "--length", str(LENGTH), "--new-tokens", str(STEPS), "--seeds", "0,1"]
    return lambda *arguments: compounding.main([*common, *arguments])


@pytest.mark.slow
def test_a_stopped_run_goes_on_and_writes_the_page(run, tmp_path, monkeypatch, capsys):
    arguments = ("--policies", "streaming,full,misplaced:share=0.2,random-pages")
    follow, calls = Stepwise.follow, []

    def failing(*follow_arguments):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return follow(*follow_arguments)

    monkeypatch.setattr(Stepwise, "follow", failing)
    with pytest.raises(KeyboardInterrupt):
        run(*arguments)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["policy"], row["seed"]) for row in printed][:5] == [
        ("full", 0), ("streaming", 0), ("misplaced:share=0.2", 0), ("random-pages", 0), ("full", 1)
    ]  # fmt: skip
    path = tmp_path / "run" / "compounding.jsonl"
    path.write_text(path.read_text()[:-20])  # the last line was cut off
    assert run(*arguments) == 0
    found = rows.read(path)
    assert len(found) == 2 * 4 and len(calls) == 5 + 2 * 3 - 3
    assert len({row["kl"][0] for row in found.values() if row["policy"] == "random-pages"}) == 2
    text = (tmp_path / "run" / "compounding.md").read_text()
    assert "## tiny, 600 tokens and 32 steps" in text and "| `misplaced:share=0.2` | 64 |" in text
    assert (tmp_path / "run" / "compounding.png").read_bytes().startswith(b"\x89PNG")
    assert run(*arguments) == 0 and len(calls) == 5 + 2 * 3 - 3  # nothing runs again
    (tmp_path / "run" / "compounding.md").unlink()
    assert compounding.main(["--page", "--out", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "compounding.md").read_text() == text


def test_a_row_of_other_weights_counts_as_missing(ours, prompt, reference, monkeypatch):
    """A row without a checksum of the weights, as older files have, counts by the model's name."""
    monkeypatch.setattr(rows, "document", document)
    monkeypatch.setattr(rows.Prompt, "read", lambda *_: prompt)
    monkeypatch.setattr(Stepwise, "reference", lambda *_: reference)
    arguments = dict(length=LENGTH, steps=STEPS, seeds=[0])
    row = next(rows.measured("tiny", ours, None, [], old={}, **arguments))
    key = tuple(row[name] for name in rows.KEY)
    assert row["weights"] == weights_sum(ours)
    older = {name: value for name, value in row.items() if name != "weights"}
    for old, missing in ((row, 0), (older, 0), (row | dict(weights=row["weights"] ^ 1), 1)):
        assert len([*rows.measured("tiny", ours, None, [], old={key: old}, **arguments)]) == missing


def line(policy="quest", seed=0, steps=96, **figures):
    key = dict(model="m", policy=policy, budget="64", length=1024, steps=steps, seed=seed)
    values = dict.fromkeys(rows.FIGURES, 0.5) | {
        name: [0.5] * (steps // BIN) for name in ("kl", "agreement", "own_kl", "own_agreement")
    }
    return key | values | dict(diverged=7, tokens=64) | figures


def test_the_page_has_means_of_seeds_and_their_ends(tmp_path):
    kl = [0.001, 0.001, 0.001, 0.005, 0.02, 0.04]  # steps 1-64 have a mean of 0.002, 65-96 of 0.03
    found = [line(kl=kl, moved_bytes=2048), line(seed=1, kl=[2 * x for x in kl], diverged=None, moved_bytes=4096)]
    found += [line("full", moved=None), line("misplaced:share=1", error=0.25)]
    page.write(found, tmp_path / "page.md")
    lines = (tmp_path / "page.md").read_text().splitlines()
    assert "## m, 1,024 tokens and 96 steps" in lines
    assert (
        "| `quest` | 64 | 3 (2-4) | 45 (30-60) | 50.0% (50.0%-50.0%) | 50.0% (50.0%-50.0%) | 0.500 (0.500-0.500) | "
        "0.500 (0.500-0.500) | 2 |"
    ) in lines
    assert any(text.startswith("| `quest` | 64 | 7, all | 50% (50%-50%) | 500 (500-500) |") for text in lines)
    assert "| `quest` | 64 | 0.5 (0.5-0.5) | 0.5 (0.5-0.5) | 3 (2-4) | 50% (50%-50%) |" in lines
    assert [text for text in lines if text.startswith("| `misplaced")] == [
        "| `misplaced:share=1` | 64 | 0.2500 | 0.5000 | 500 | 50.0% | 1 |"
    ]
    assert sum("`full`" in text for text in lines if text.startswith("|")) == 2
    assert page.spans(512) == [(0, 4), (4, 8), (8, 16), (16, 32)] and page.spans(64) == [(0, 4)] and page.spans(16) == [(0, 1)]
