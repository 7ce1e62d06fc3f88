"""The pass-key task: facts are where they should be, held-out means held out, and the shares have their interval."""

import json

import numpy as np
import pytest

from bench.needle import evaluate, export, stages, task
from icejax.generation import ASSETS


def test_contexts_hold_their_facts_once_at_full_length():
    rng = np.random.default_rng(0)
    for facts in (1, 7):
        context = task.context(rng, length=3000, facts=facts, split="heldout")
        assert len(context.text) == 3000 and context.text.endswith(b"\n") and len(context.answers) == facts
        for name, digits in context.answers.items():
            assert (
                context.text.count(f"\n{task.question(name)}{digits}.\n".encode())
                + context.text.startswith(f"{task.question(name)}{digits}.\n".encode())
                == 1
            )


def test_splits_share_nothing():
    assert not set(task.names("train")) & set(task.names("heldout"))
    rng = np.random.default_rng(1)
    assert all(int(task.digits(rng, "heldout")) % 7 == 0 and int(task.digits(rng, "train")) % 7 != 0 for _ in range(100))
    lines = {split: {line for line in task.corpus(split).split(b"\n") if len(line) > 60} for split in ("train", "heldout")}
    assert len(lines["train"] & lines["heldout"]) < 0.06 * len(lines["heldout"])  # headers and boilerplate; measured 0.045


def test_too_many_facts_for_a_context():
    with pytest.raises(ValueError, match="20 facts do not fit in a context of 100 bytes"):
        task.context(np.random.default_rng(0), length=100, facts=20, split="train")


@pytest.mark.parametrize("stage", stages.STAGES, ids=lambda stage: str(stage.length))
def test_batches_are_repeatable_and_weigh_what_they_should(stage):
    batch, again = (stages.batch(stage, np.random.default_rng(3)) for _ in range(2))
    np.testing.assert_array_equal(batch.tokens, again.tokens)
    assert batch.tokens.shape == (stage.batch, stage.length) and batch.tokens.max() <= task.EOS
    assert (np.diff(batch.positions) >= 1).all() and batch.positions.max() < stages.MAX_POSITION
    answers = batch.weights == stages.ANSWER_WEIGHT
    for tokens, weights, crowding in zip(batch.tokens[:, 1:], answers, batch.crowding, strict=True):
        if weights.any():
            text = bytes(tokens[weights].tolist()).decode()
            assert len(text) % task.ANSWER_LENGTH == 0
            asked = {text[i : i + task.ANSWER_LENGTH] for i in range(0, len(text), task.ANSWER_LENGTH)}
            whole = bytes(t for t in tokens.tolist() if t < 256).decode()
            assert all(a[:-1].isdigit() and a[-1] == "." and whole.count(a) >= 2 for a in asked)
            assert (crowding[1:][weights] == 0).all()


def test_wilson_interval_of_known_cases():
    """Newcombe 1998, table I: 81 of 263 is 0.2553 to 0.3662; 0 of 20 reaches to 0.1611."""
    assert evaluate.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert evaluate.wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


def test_byte_tokenizer_is_the_bundled_one():
    ours = export.byte_tokenizer()
    text = "".join(map(chr, range(1, 300))) + "日本"
    assert ours(text)["input_ids"] == list(text.encode())
    bundled = json.loads((ASSETS / "tokenizer.json").read_text())
    assert json.loads(ours.backend_tokenizer.to_str())["model"] == bundled["model"]


@pytest.mark.parametrize("cache", ["full", "clustered"])
def test_evaluation_of_the_bundled_model(capsys, cache):
    assert evaluate.main(["--lengths", "1024", "--questions", "8", "--cache", cache, "--budget", "128"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert {"length", "facts", "questions", "exact", "low", "high", "cache", "budget", "tpot_s"} <= set(row)
    assert row["exact"] >= 7 / 8 and row["low"] < row["exact"] and row["cache"] == cache
    assert row["budget"] == (128 if cache == "clustered" else None)


def test_evaluation_refuses_bad_input_in_one_line(capsys):
    assert evaluate.main(["--model", "/no/such"]) == 2
    assert evaluate.main(["--cache", "best"]) == 2
    assert evaluate.main(["--lengths", "abc"]) == 2
    assert evaluate.main(["--questions", "0"]) == 2
    assert evaluate.main(["--lengths", "5"]) == 2
    assert capsys.readouterr().err.count("\n") == 5
