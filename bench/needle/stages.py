"""The curriculum of the bundled model, and the batches of a stage: for `bench.needle.train`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.needle import task

MAX_POSITION = 32768
FILLER_WEIGHT, ANSWER_WEIGHT = 0.3, 10.0
LOCAL = 64  # tokens; crowding makes only keys farther back than this count more often


@dataclass(frozen=True)
class Stage:
    """One stage of training; the learning rate falls to zero along a cosine within it.

    Attributes:
        length: tokens per sequence.
        steps: optimiser steps.
        batch: sequences per step.
        keys: largest number of plain keys in a sequence, which asks for all its facts at its end.
        chains, hops: largest numbers of names with several values, and of hops.
        copying: share of sequences that repeat random strings instead.
        crowd: largest factor by which distant keys count in the softmax; 1: no crowding. With a factor of 16 a retrieval head
            must be as sharp in 320 tokens as in a text of about 5,000.
        skip: whether position ids jump, so that short sequences contain long distances.
        rate: peak learning rate, as a share of each optimiser's rate.
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
    """One batch.

    Attributes:
        tokens: i32[B, T].
        positions: position ids, i32[B, T].
        weights: loss weights of the predicted tokens, f32[B, T - 1].
        crowding: logarithm of how often a token counts as a distant key, f32[B, T].
    """

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
    question_tokens = sum(len(question.text + question.answer) + 1 for question in drawn.questions)
    text = task.hide(rng, drawn, length=stage.length - question_tokens, split="train", kinds=stage.kinds)
    crowding = np.full(stage.length, np.log(stage.crowd) * rng.random())
    crowding[len(text) :] = 0.0
    for line in drawn.lines:
        start = text.find(line)
        crowding[start : start + len(line)] = 0.0
    tokens, weights = [np.frombuffer(text, np.uint8)], [np.full(len(text), FILLER_WEIGHT)]
    for i in rng.permutation(len(drawn.questions)):
        head, answer = drawn.questions[i].text.encode(), drawn.questions[i].answer.encode()
        tokens += [np.frombuffer(head + answer, np.uint8), [task.EOS]]
        weights += [np.zeros(len(head)), np.full(len(answer), ANSWER_WEIGHT), [1.0]]
    return np.concatenate(tokens).astype(np.int32), np.concatenate(weights).astype(np.float32), crowding.astype(np.float32)


def _copying(stage: Stage, rng: np.random.Generator):
    """Returns random strings of 8 to 64 printable bytes, each repeated after a gap: they form the copying heads."""
    tokens, weights = np.empty(0, np.int32), np.empty(0, np.float32)
    while len(tokens) < stage.length:
        string = rng.integers(32, 127, size=int(rng.integers(8, 65)))
        gap = rng.integers(32, 127, size=int(rng.integers(0, 33)))
        tokens = np.concatenate([tokens, string, gap, string])
        copy_weights = np.full(len(string), 1.0)
        copy_weights[:2] = 0.0  # the start of a copy cannot be predicted
        weights = np.concatenate([weights, np.zeros(len(string) + len(gap)), copy_weights])
    return (
        tokens[: stage.length].astype(np.int32),
        weights[: stage.length].astype(np.float32),
        np.zeros(stage.length, np.float32),
    )


def _positions(stage: Stage, rng: np.random.Generator) -> np.ndarray:
    """Returns increasing position ids i32[T] below MAX_POSITION, with random jumps at 1 to 6 places.

    For example, 8 tokens with cuts at 3 and 6 and jumps 100 and 250 are 0 1 2 103 104 105 256 257.
    """
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
