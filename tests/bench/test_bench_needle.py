"""`bench.needle`, the pass-key task: contexts, questions, splits, training batches, and evaluation with its intervals."""

import json

import numpy as np
import pytest

import icejax
from bench.needle import evaluate, export, language, stages, task
from bench.needle.reader import Reader
from icejax.api.generate import ASSETS
from icejax.checks.errors import InputError
from tests import tolerances
from tests.helpers import families
from tests.helpers.layer import stored


def facts_of(text: bytes) -> list[str]:
    return [line.decode() for line in text.split(b"\n") if line.startswith(b"Pass key")]


@pytest.mark.parametrize("name", task.TASKS)
def test_contexts_hold_their_facts_once_at_full_length(name):
    form = task.TASKS[name]
    context = task.context(np.random.default_rng(0), length=3000, facts=form.facts, split="heldout")
    assert len(context.text) == 3000 and context.text.endswith(b"\n")
    assert sorted(facts_of(context.text)) == sorted(fact.decode() for fact in context.facts)
    assert len(context.asked(form)) == {"key": form.facts.keys, "values": 1, "hop": form.facts.hops}[form.asked]


def follow(lines: list[str], question: task.Question) -> str:
    """Finds the answer by reading the facts one after another."""
    name = question.text.split()[-1][:-1]
    if question.asked == "hop":
        (target,) = (line.split()[-1][:-1] for line in lines if line.startswith(f"Pass key {name}:key"))
        return f"key {target}:" + next(line.split(":")[1] for line in lines if line.startswith(f"Pass key {target}:"))
    values = [line.split(":")[1][:-1] for line in lines if line.startswith((f"Pass key {name}:", f"Pass key {name} after"))]
    return ":".join(values) + "."


def test_answers_are_what_a_reader_finds():
    rng = np.random.default_rng(5)
    for _ in range(20):
        context = task.context(rng, length=2000, facts=task.Facts(keys=3, chains=2, hops=3), split="train")
        lines = facts_of(context.text)
        assert [question.asked for question in context.questions] == ["key"] * 3 + ["values"] * 2 + ["hop"] * 3
        assert all(follow(lines, question) == question.answer for question in context.questions)
        assert all(
            question.answer.count(":") == task.VALUES - 1 for question in context.questions if question.asked == "values"
        )


def test_splits_share_nothing():
    assert not set(task.names("train")) & set(task.names("heldout"))
    rng = np.random.default_rng(1)
    assert all(int(task.digits(rng, "heldout")) % 7 == 0 and int(task.digits(rng, "train")) % 7 != 0 for _ in range(100))
    lines = {
        split: {line for line in task.corpus(split, "code").split(b"\n") if len(line) > 60} for split in ("train", "heldout")
    }
    assert len(lines["train"] & lines["heldout"]) < 0.06 * len(lines["heldout"])  # headers and boilerplate; measured 0.045


def test_too_many_facts_for_a_context():
    with pytest.raises(InputError, match="facts of 380 bytes do not fit in a context of 100"):
        task.context(np.random.default_rng(0), length=100, facts=task.Facts(keys=20), split="train")


def test_a_context_longer_than_the_text_there_is():
    with pytest.raises(InputError, match="shorter than the [0-9,]+ bytes of text that there are, got 1,000,000,000"):
        task.hide(np.random.default_rng(0), task.Drawn((), ()), length=10**9, split="train", kinds=("licence",))


@pytest.mark.parametrize("stage", stages.STAGES, ids=lambda stage: f"{stage.length}-{stage.chains}")
def test_batches_are_repeatable_and_weigh_what_they_should(stage):
    batch, repeated = (stages.batch(stage, np.random.default_rng(3)) for _ in range(2))
    np.testing.assert_array_equal(batch.tokens, repeated.tokens)
    assert batch.tokens.shape == (stage.batch, stage.length) and batch.tokens.max() <= task.EOS
    assert (np.diff(batch.positions) >= 1).all() and batch.positions.max() < stages.MAX_POSITION
    for tokens, weights, crowding in zip(batch.tokens, batch.weights, batch.crowding, strict=True):
        answers = np.append(False, weights == stages.ANSWER_WEIGHT)
        if not answers.any():
            continue
        assert (crowding[answers] == 0).all()
        end = int(np.flatnonzero(answers)[0])
        text = bytes(np.where(tokens < 256, tokens, ord("\n")).astype(np.uint8))
        start = text.rindex(b"\n", 0, end) + 1  # where the first question starts
        lines = facts_of(text[:start])
        turns = text[start:].decode().split("\n")[:-1]
        heads = [turn[: turn.index(":") + 1] for turn in turns]
        assert bytes(tokens[answers].astype(np.uint8)).decode() == "".join(
            turn[len(head) :] for turn, head in zip(turns, heads, strict=True)
        )
        for head, turn in zip(heads, turns, strict=True):
            kind = "values" if head.startswith("Pass keys") else "hop" if ":key " in turn else "key"
            assert turn == head + follow(lines, task.Question(head, "", kind))


def test_wilson_interval_of_known_cases():
    """Newcombe 1998, table I: 81 of 263 is 0.2553 to 0.3662; 0 of 20 reaches to 0.1611."""
    assert evaluate.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert evaluate.wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


def test_byte_tokenizer_is_the_bundled_one():
    exported = export.byte_tokenizer()
    text = "".join(map(chr, range(1, 300))) + "日本"
    assert exported(text)["input_ids"] == list(text.encode())
    bundled = json.loads((ASSETS / "tokenizer.json").read_text())
    assert json.loads(exported.backend_tokenizer.to_str())["model"] == bundled["model"]


@pytest.mark.parametrize("cache", ["full", pytest.param("clustered", marks=pytest.mark.slow)])
def test_evaluation_of_the_bundled_model(capsys, cache):
    arguments = ["--tasks", "multikey-4", "--lengths", "1024", "--questions", "8", "--cache", cache]
    assert evaluate.main(arguments + (["--budget", "128"] if cache == "clustered" else [])) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["exact"] >= 7 / 8 and row["low"] < row["exact"] and row["cache"] == cache
    assert (row["task"], row["questions"], row["contexts"]) == ("multikey-4", 8, 2) and row["tpot_s"] > 0
    assert row["budget"] == (128 if cache == "clustered" else None)


@pytest.mark.slow
def test_facts_in_the_models_own_turn_and_questions_in_one_text(capsys):
    assert evaluate.main(["--tasks", "early,multiquery-4", "--lengths", "512", "--questions", "4", "--cache", "clustered"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["task"] for row in rows] == ["early", "multiquery-4"] and min(row["exact"] for row in rows) >= 3 / 4


@pytest.mark.slow
def test_questions_leave_the_text_as_it_was(bundled):
    """A question gives the same answer before and after another question and a flush, and through `generate`."""
    model, tokenizer = bundled
    policy = icejax.Clustered(budget=64)
    text = task.context(np.random.default_rng(1), length=1500, facts=task.Facts(keys=2), split="heldout")
    reader = Reader(model, policy, prompt_tokens=1500, new_tokens=64)
    reader.read(list(text.text))
    first, second = (list(question.text.encode()) for question in text.questions)
    answers = [reader.ask(question, 24) for question in (first, second, first)]
    assert answers[0] == answers[2] != answers[1]
    reader.continue_with(list(b"x" * 20))
    assert len(reader.ask(first, 3)) == 3
    (response,) = icejax.generate(model, tokenizer, (text.text + text.questions[0].text.encode()).decode(), max_new_tokens=6)
    assert bytes(answers[0][:6]).decode() == response.text == text.questions[0].answer


@pytest.mark.slow
def test_questions_across_a_compaction_leave_pages_unchanged(bundled):
    model, _ = bundled
    context = task.context(np.random.default_rng(1), length=800, facts=task.Facts(keys=1), split="heldout")
    reader = Reader(model, icejax.Clustered(budget=64, compact_every=32), prompt_tokens=800, new_tokens=64)
    reader.read(list(context.text))
    reader.continue_with(list(b"one and two and three and four"))  # 30 tokens: the first 16 are a page in the pool
    table = reader._state.cache.table
    before = stored(reader._pool, table)
    (question,) = context.questions
    first, second = (reader.ask(list(question.text.encode()), 6) for _ in range(2))
    np.testing.assert_array_equal(stored(reader._pool, table), before)
    assert before.any() and first == second


def test_trigram_knows_what_it_was_shown():
    """Worked by hand on 'abab': P(b | b a) = (1 + P(b | a)) / 2, and likewise P(b | a) from P(b)."""
    model = language.Trigram(b"abab")
    lowest = (2 + 2 / 128) / 6
    second = (2 + lowest) / 3
    assert model.bits(b"bab")[0] == pytest.approx(-np.log2((1 + second) / 2), rel=1e-5)


def test_sliding_window_bits_equal_those_of_transformers(tmp_path):
    hf_model, tokens = families.build(families.row("mistral-window")), families.tokens(256)
    import torch

    with torch.no_grad():
        log_probabilities = torch.log_softmax(hf_model(torch.tensor([tokens])).logits[0, :-1], -1).numpy()[
            np.arange(255), tokens[1:]
        ]
    bits = language._bits(families.load(hf_model, tmp_path), np.asarray([tokens], np.int32))[0]
    np.testing.assert_allclose(bits, -log_probabilities / np.log(2), rtol=0, atol=tolerances.LOGITS)


def test_evaluation_refuses_bad_input_in_one_line(capsys):
    for arguments in (
        ["--model", "/no/such"],
        ["--cache", "best"],
        ["--lengths", "abc"],
        ["--questions", "0"],
        ["--lengths", "5"],
    ):
        assert evaluate.main(arguments) == 2
    assert evaluate.main(["--tasks", "single,all"]) == 2
    assert capsys.readouterr().err.count("\n") == 6
