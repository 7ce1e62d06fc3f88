"""Trains the bundled model or one of the panel: ``python -m bench.needle.train --out DIR [--member NAME] [--seed S]``.

The command trains a model of `bench.needle.members` on bytes, stage by stage, in PyTorch, which on two cores is twice as fast
as a plain fp32 JAX step. It can be stopped and resumed at any time: the state is written to DIR every few minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from bench.needle import stages, task
from bench.needle.members import MEMBERS, Member

MUON_RATE, ADAMW_RATE = 0.005, 2e-3
SAVE_EVERY_S = 180.0


def untrained(member: Member) -> PreTrainedModel:
    """Returns a model of the member's shape with random weights."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(member.model_type, **member.config))
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.constant_(parameter, member.gain)
    return model


class Trainer:
    """The model, its two optimisers, and the position in the curriculum."""

    def __init__(self, out: Path, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.out, self.run, self.stage, self.step = out, (name, seed), 0, 0
        self.model = untrained(MEMBERS[name])
        adamw_parts = ("embed", *MEMBERS[name].by_adamw)
        muon_matrices = [
            p for n, p in self.model.named_parameters() if p.ndim == 2 and not any(part in n for part in adamw_parts)
        ]
        adamw_parameters = [
            p for n, p in self.model.named_parameters() if p.ndim != 2 or any(part in n for part in adamw_parts)
        ]
        self.optimizers = [
            torch.optim.Muon(muon_matrices, lr=MUON_RATE, weight_decay=0.01, adjust_lr_fn="original"),
            torch.optim.AdamW(adamw_parameters, lr=ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.rates = [MUON_RATE, ADAMW_RATE]

    def save(self) -> None:
        state = dict(model=self.model.state_dict(), stage=self.stage, step=self.step, run=self.run)
        state["optimizers"] = [o.state_dict() for o in self.optimizers]
        torch.save(state, self.out / "state.pt.part")
        os.replace(self.out / "state.pt.part", self.out / "state.pt")

    def resume(self) -> None:
        state = torch.load(self.out / "state.pt")
        if state["run"] != self.run:
            saved_run, asked_run = (f"{name} with seed {seed}" for name, seed in (state["run"], self.run))
            raise SystemExit(f"{self.out} holds a run of {saved_run}, not {asked_run}: choose another --out")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.stage, self.step = state["stage"], state["step"]

    def update(self, batch: stages.Batch, stage: stages.Stage) -> tuple[float, float]:
        """Takes the next optimiser step of `stage`; returns the text loss and the answer loss in nats."""
        progress = self.step / stage.steps
        rate = stage.rate * min(1.0, progress / 0.03) * max(0.02, 0.5 * (1 + math.cos(math.pi * progress)))
        for optimizer, peak in zip(self.optimizers, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
        tokens = torch.from_numpy(batch.tokens).long()
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(
                tokens, attention_mask=_mask(batch), position_ids=torch.from_numpy(batch.positions).long(), use_cache=False
            ).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
        )
        weights = torch.from_numpy(batch.weights).flatten()
        (loss * weights).sum().div(weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        answers, text = weights == stages.ANSWER_WEIGHT, weights == stages.FILLER_WEIGHT
        return tuple(float(loss.detach()[kind].mean()) if kind.any() else math.nan for kind in (text, answers))


def _mask(batch: stages.Batch) -> torch.Tensor | None:
    """Returns the additive mask [B, 1, T, T], causal with the crowding of distant keys; None for a plain causal mask.

    A batch whose position ids jump needs a mask, because transformers would take every jump for the beginning of another text.
    """
    if not batch.crowding.any() and (np.diff(batch.positions) == 1).all():
        return None
    length = batch.tokens.shape[1]
    row, column = torch.arange(length)[:, None], torch.arange(length)
    crowding = torch.from_numpy(batch.crowding)[:, None, None, :] * (row - column > stages.LOCAL)
    return crowding.masked_fill(row < column, -math.inf).to(torch.bfloat16)


@torch.no_grad()
def exact(model: PreTrainedModel, name: str, *, length: int, contexts: int) -> float:
    """Returns the teacher-forced share of held-out answers of a task: every token is the model's first choice."""
    rng, hits = np.random.default_rng((length, *name.encode())), []
    for _ in range(contexts):
        context = task.context(rng, length=length, facts=task.TASKS[name].facts, split="heldout")
        with torch.autocast("cpu", torch.bfloat16):
            past = model(torch.tensor([list(context.text)]), use_cache=True, logits_to_keep=1).past_key_values
            for question in context.asked(task.TASKS[name]):
                question_bytes = (question.text + question.answer).encode()
                logits = model(torch.tensor([list(question_bytes)]), past_key_values=past, use_cache=True).logits[0]
                past.crop(-len(question_bytes))  # a negative number removes so many tokens
                hits.append(logits[len(question.text) - 1 : -1].argmax(-1).tolist() == list(question.answer.encode()))
    return sum(hits) / len(hits)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; an interrupted one continues")
    parser.add_argument("--member", choices=MEMBERS, default="bundled", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="model folder whose weights begin the run, with --stage")
    parser.add_argument("--stage", type=int, default=0, help="first stage (default: %(default)s)")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    trainer, curriculum = Trainer(arguments.out, arguments.member, arguments.seed), MEMBERS[arguments.member].stages
    if (arguments.out / "state.pt").exists():
        trainer.resume()
    elif arguments.model is not None:
        trainer.model.load_state_dict(AutoModelForCausalLM.from_pretrained(arguments.model, dtype="float32").state_dict())
        trainer.stage = arguments.stage
    log = (arguments.out / "log.jsonl").open("a")
    saved = time.monotonic()
    while trainer.stage < len(curriculum):
        stage = curriculum[trainer.stage]
        started, losses = time.monotonic(), []
        while trainer.step < stage.steps:
            rng = np.random.default_rng((arguments.seed, trainer.stage, trainer.step))
            losses.append(trainer.update(stages.batch(stage, rng), stage))
            trainer.step += 1
            if trainer.step % 50 == 0 or trainer.step == stage.steps:
                text, answer = np.nanmean(losses, axis=0)
                speed = len(losses) * stage.batch * stage.length / (time.monotonic() - started)
                row = dict(
                    stage=trainer.stage, step=trainer.step, text=round(text, 4), answer=round(answer, 4), tokens_s=round(speed)
                )
                _write(log, row)
                started, losses = time.monotonic(), []
            if time.monotonic() - saved > SAVE_EVERY_S:
                trainer.save()
                saved = time.monotonic()
        trainer.save()
        _evaluate(trainer, log)
        trainer.stage, trainer.step = trainer.stage + 1, 0
        trainer.save()


def _evaluate(trainer: Trainer, log) -> None:
    trainer.model.eval()
    for name in ("multikey-4", "multikey-16", "multivalue-4", "hops"):
        for length, contexts in ((1024, 20), (8192, 6)):
            share = exact(trainer.model, name, length=length, contexts=contexts)
            _write(log, dict(stage=trainer.stage, task=name, length=length, exact=round(share, 3)))
    trainer.model.train()


def _write(log, row: dict) -> None:
    print(json.dumps(row), flush=True)
    log.write(json.dumps(row) + "\n")
    log.flush()


if __name__ == "__main__":
    main()
