"""`bench.needle.train` and `export`: an interrupted run resumes exactly, and the exported folder is the trained model."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import icejax
from bench.needle import export, members, stages, train
from icejax.cache.registry import Full
from tests import tolerances
from tests.helpers.run import all_logits

TINY = (
    stages.Stage(length=96, steps=2, batch=2, keys=1, copying=0.5, skip=False),
    stages.Stage(length=128, steps=3, batch=2, keys=2, crowd=8),
)


@pytest.fixture
def tiny(monkeypatch):
    for name, member in members.MEMBERS.items():
        monkeypatch.setitem(members.MEMBERS, name, dataclasses.replace(member, stages=TINY))
    monkeypatch.setattr(train, "_evaluate", lambda trainer, log: None)


@pytest.fixture
def once(tiny, monkeypatch):
    """One step per stage, for tests whose model need not be good."""
    for name, member in members.MEMBERS.items():
        short = tuple(dataclasses.replace(stage, steps=1) for stage in member.stages)
        monkeypatch.setitem(members.MEMBERS, name, dataclasses.replace(member, stages=short))


def weights(run) -> dict[str, torch.Tensor]:
    return torch.load(run / "state.pt")["model"]


@pytest.mark.slow
def test_an_interrupted_run_ends_as_an_uninterrupted_one(tiny, tmp_path, monkeypatch, capsys):
    train.main(["--out", str(tmp_path / "whole"), "--seed", "3"])
    monkeypatch.setattr(train, "SAVE_EVERY_S", -1.0)  # after every step
    update, calls = train.Trainer.update, []

    def failing(self, *arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return update(self, *arguments)

    monkeypatch.setattr(train.Trainer, "update", failing)
    with pytest.raises(KeyboardInterrupt):
        train.main(["--out", str(tmp_path / "cut"), "--seed", "3"])
    train.main(["--out", str(tmp_path / "cut"), "--seed", "3"])
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(whole[key], cut[key]) for key in whole)
    rows = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert [(r["stage"], r["step"]) for r in rows] == [(0, 2), (1, 3)]
    with pytest.raises(SystemExit, match="holds a run of bundled with seed 3, not bundled with seed 4: choose another --out"):
        train.main(["--out", str(tmp_path / "cut"), "--seed", "4"])


def test_export_is_the_trained_model(once, tmp_path, capsys):
    train.main(["--out", str(tmp_path / "run")])
    export.main(["--run", str(tmp_path / "run"), "--to", str(tmp_path / "model")])
    model, tokenizer = icejax.load(tmp_path / "model")
    trained = weights(tmp_path / "run")["model.layers.2.mlp.up_proj.weight"].to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(model.model.layers[2].mlp.up_proj.weight[...], trained)
    prompt = (tmp_path / "model" / "prompt.txt").read_text()
    answer = capsys.readouterr().out.split()[-1]
    assert len(prompt) > 16_000 and f"{prompt[prompt.rindex('Pass key') :]}{answer}" in prompt and prompt.count("Pass key") == 5
    assert tokenizer(prompt)["input_ids"] == list(prompt.encode())


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("uncrowded", "adamw", "mha"))]
)
def test_a_model_of_the_panel_is_read_as_it_was_trained(name, once, tmp_path):
    train.main(["--out", str(tmp_path / "run"), "--member", name])
    export.main(["--run", str(tmp_path / "run"), "--to", str(tmp_path / "model")])
    model, _ = icejax.load(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").stat().st_size < 6e6 and not (tmp_path / "model" / "prompt.txt").exists()
    tokens = list(b"Pass key qx:")
    hf_model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")
    with torch.no_grad():
        expected = hf_model(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(all_logits(model, tokens, Full()), expected, rtol=0, atol=tolerances.LOGITS)


def test_tokens_behind_a_jump_of_positions_see_those_before_it():
    stage = stages.Stage(length=96, steps=1, batch=1, keys=1)
    batch = next(
        b for b in (stages.batch(stage, np.random.default_rng(i)) for i in range(9)) if (np.diff(b.positions) > 1).any()
    )
    model = train.untrained(members.MEMBERS["uncrowded"])
    tokens = torch.from_numpy(batch.tokens).long().repeat(2, 1)
    tokens[1, 0] += 1
    with torch.no_grad():
        positions, mask = torch.from_numpy(batch.positions).long(), train._mask(batch).float()
        logits = model(tokens, attention_mask=mask.expand(2, -1, -1, -1), position_ids=positions.expand(2, -1)).logits
    assert not batch.crowding.any() and (logits[0, -1] != logits[1, -1]).any()
