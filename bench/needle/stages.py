"""The curriculum of the bundled model, and the batches of a stage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.needle import task

MAX_POSITION = 32768
FILLER_WEIGHT, ANSWER_WEIGHT = 0.3, 10.0
LOCAL = 64  # nearer keys keep their weight when distant text is made to count more often


@dataclass(frozen=True)
class Stage:
    """One stage of training; the learning rate falls to zero along a cosine within it.

    Attributes:
        length: tokens per sequence.
        steps: optimiser steps.
        batch: sequences per step.
        keys: largest number of plain keys in a sequence; all that it hides is asked for at its end.
        chains, hops: largest numbers of names with several values, and of hops.
        copying: share of sequences that repeat random strings instead.
        crowd: largest factor by which distant text may count in the softmax (1: not at all). A text of `length`
            tokens whose distant part counts `crowd` times asks of a retrieval head what a longer text asks of it.
        skip: whether position ids jump, so that far distances are seen in short sequences.
        rate: peak learning rate, as a share of the optimisers' own.
        kinds: kinds of text.
    """

    length: int
    steps: int
    batch: int
    keys: int
    chains: int = 0
    hops: int = 0
    copying: float = 0.0
    crowd: float = 1.0
    skip: bool = True
    rate: float = 1.0
    kinds: tuple[task.Kind, ...] = ("code",)


STAGES = (
    Stage(length=160, steps=900, batch=32, keys=2, copying=0.5, skip=False),
    Stage(length=320, steps=1200, batch=20, keys=4, copying=0.1, crowd=16),
    Stage(length=640, steps=900, batch=10, keys=8, crowd=32),
    Stage(length=640, steps=700, batch=10, keys=4, chains=1, hops=2, crowd=16, rate=0.8, kinds=task.KINDS),
    Stage(length=2048, steps=700, batch=4, keys=12, chains=2, hops=3, crowd=16, rate=0.6, kinds=task.KINDS),
    Stage(length=8192, steps=120, batch=1, keys=16, chains=3, hops=4, crowd=4, rate=0.4, kinds=task.KINDS),
)


@dataclass(frozen=True)
class Batch:
    """One batch. Shapes: tokens i32[B, T]; positions i32[B, T]; weights f32[B, T - 1] of the predicted tokens;
    crowding f32[B, T], the logarithm of how often a token counts as a distant key."""

    tokens: np.ndarray
    positions: np.ndarray
    weights: np.ndarray
    crowding: np.ndarray


def batch(stage: Stage, rng: np.random.Generator) -> Batch:
    """Returns a batch of `stage` drawn from `rng`."""
    rows = [_copying(stage, rng) if rng.random() < stage.copying else _retrieval(stage, rng) for _ in range(stage.batch)]
    tokens, weights, crowding = (np.stack(column) for column in zip(*rows, strict=True))
    positions = np.stack([_positions(stage, rng) for _ in range(stage.batch)])
    return Batch(tokens, positions, weights[:, 1:], crowding)


def _retrieval(stage: Stage, rng: np.random.Generator):
    facts = task.Facts(int(rng.integers(1, stage.keys + 1)), *(int(rng.integers(0, n + 1)) for n in (stage.chains, stage.hops)))
    drawn = task.draw(rng, facts, "train")
    asked = sum(len(question.text + question.answer) + 1 for question in drawn.questions)
    text = task.hide(rng, drawn, length=stage.length - asked, split="train", kinds=stage.kinds)
    crowding = np.full(stage.length, np.log(stage.crowd) * rng.random())
    crowding[len(text) :] = 0.0
    for line in drawn.lines:
        at = text.find(line)
        crowding[at : at + len(line)] = 0.0
    tokens, weights = [np.frombuffer(text, np.uint8)], [np.full(len(text), FILLER_WEIGHT)]
    for i in rng.permutation(len(drawn.questions)):
        head, answer = drawn.questions[i].text.encode(), drawn.questions[i].answer.encode()
        tokens += [np.frombuffer(head + answer, np.uint8), [task.EOS]]
        weights += [np.zeros(len(head)), np.full(len(answer), ANSWER_WEIGHT), [1.0]]
    return np.concatenate(tokens).astype(np.int32), np.concatenate(weights).astype(np.float32), crowding.astype(np.float32)


def _copying(stage: Stage, rng: np.random.Generator):
    """Random strings of 8 to 64 printable bytes, each repeated once somewhere later: the seed of retrieval heads."""
    tokens, weights = np.empty(0, np.int32), np.empty(0, np.float32)
    while len(tokens) < stage.length:
        string = rng.integers(32, 127, size=int(rng.integers(8, 65)))
        gap = rng.integers(32, 127, size=int(rng.integers(0, 33)))
        tokens = np.concatenate([tokens, string, gap, string])
        seen = np.full(len(string), 1.0)
        seen[:2] = 0.0  # nothing says yet that a copy begins
        weights = np.concatenate([weights, np.zeros(len(string) + len(gap)), seen])
    return (
        tokens[: stage.length].astype(np.int32),
        weights[: stage.length].astype(np.float32),
        np.zeros(stage.length, np.float32),
    )


def _positions(stage: Stage, rng: np.random.Generator) -> np.ndarray:
    """Position ids of 1 to 6 contiguous chunks with random jumps between them, up to MAX_POSITION."""
    positions = np.arange(stage.length, dtype=np.int32)
    if not stage.skip:
        return positions
    chunks = int(rng.integers(1, 7))
    cuts = np.sort(rng.choice(np.arange(1, stage.length), size=chunks, replace=False))
    room = int((MAX_POSITION - stage.length) * rng.random() ** 2)
    jumps = np.sort(rng.integers(0, room + 1, size=chunks))
    for cut, jump in zip(cuts, np.diff(jumps, prepend=0), strict=True):
        positions[cut:] += jump
    return positions
