"""Policies on a model of any tokenizer: each decodes the true continuation of a question (`bench.texts`).

The question stands at the end of the exact prefill. A policy's cache is built of text and question, and decodes the
continuation's tokens whatever it would have chosen itself. A line per question has these figures:

- `error`, `error_95`: relative L2 error of a head's attention output, mean and 95th percentile over heads, layers and steps.
  Queries, keys and values are the exact ones. Layers that `clustered` attends to densely, and layers with a sliding window, do
  not count.
- `kl`: KL divergence of the next token from the full cache's, in nats, mean over steps.
- `agreement`: share of steps whose most likely token is the full cache's.
- `right`: whether the most likely tokens are the continuation, as in a greedy answer.
- `device_bytes`, `host_bytes`, `moved_bytes`: cache on the device, pages in host memory, and bytes moved per step, of a model
  whose keys and values have 16 bits.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench import texts
from bench.compare import cells, tuned
from bench.compare.cells import Contender
from bench.compare.subject import Measured, Subject
from bench.compare.text import SHORT, Text
from bench.steps.sizes import fetched_bytes, fetched_per_step, nbytes
from icejax.cache.options import make_policy
from icejax.cache.pool.page_format import pool_bytes, pool_shapes
from icejax.cache.protocol import CachePolicy
from icejax.cache.registry import Clustered, Full, Ring, layer_policies
from icejax.engine.plan import Plan
from icejax.engine.snapshot.fingerprint import weights_sum
from icejax.models.decoder import CausalLM
from icejax.runtime import devices

KEY = ("model", "policy", "budget", "length", "task", "text", "question")
FIGURES = ("error", "error_95", "kl", "agreement", "right", "attended", "device_bytes", "host_bytes", "moved_bytes")
TEXT_BYTES = 3 * 2**30  # limit of the texts that are in memory together


@dataclasses.dataclass(frozen=True)
class Asked:
    """A question about a text.

    Attributes:
        continuation: the tokens of the true continuation.
        before: the text with the question after it.
        answered: the text with question and continuation after it.
        logits: the full cache's logits after all tokens of the continuation, f32[tokens, vocabulary].
    """

    continuation: list[int]
    before: Text
    answered: Text
    logits: np.ndarray

    @classmethod
    def of(cls, text: Text, question: texts.Question) -> Asked:
        """Reads a question and its continuation after a text."""
        answered = text.then([*question.tokens, *question.continuation])
        return cls(question.continuation, text.then(question.tokens), answered, answered.logits()[len(question.tokens) :])


class Forced(Subject):
    """A policy that decodes true continuations.

    Attributes:
        layers: numbers of the layers whose errors count.
    """

    def __init__(self, model: CausalLM, policy: CachePolicy, *, length: int, new_tokens: int = SHORT) -> None:
        super().__init__(model, policy, prompt_tokens=length, new_tokens=new_tokens)
        by_layer = layer_policies(Clustered(), model.config, capacity=self._plan.spec.capacity)
        self.layers = [i for i, policy in enumerate(by_layer) if not isinstance(policy, Full | Ring)]

    def measured(self, asked: Asked) -> Measured:
        """Reads a text with its question, and returns the errors of the steps of the continuation."""
        self.read_question(asked)
        return self.measure(asked.answered, steps=len(asked.continuation) - 1)

    def read_question(self, asked: Asked) -> None:
        """Reads a text with its question."""
        self.read(asked.before.tokens, asked.before.under(self._plan))

    def attended(self, measured: Measured) -> float:
        """Returns the mean number of tokens that a query head attends to exactly, in the layers whose errors count."""
        return float(measured.tokens[:, self.layers, 0].mean())

    def figures(self, asked: Asked) -> dict[str, float]:
        """Returns `FIGURES` of a question."""
        forced, measured = asked.continuation[:-1], self.measured(asked)
        logits, fetched = self.force(forced)
        exact, best = asked.logits[: len(forced)], logits.argmax(-1)
        errors = measured.errors[:, self.layers]
        figures = dict(
            error=errors.mean(),
            error_95=np.quantile(errors, 0.95),
            kl=divergence(exact, logits).mean(),
            agreement=(best == exact.argmax(-1)).mean(),
            right=[asked.before.next, *best.tolist()] == asked.continuation,
            attended=self.attended(measured),
        )
        return {name: float(f"{value:.5g}") for name, value in figures.items()} | self.bytes_16(fetched)

    @functools.cached_property
    def plan_16(self) -> Plan:
        """The plan as if keys and values had 16 bits."""
        return dataclasses.replace(self._plan, spec=dataclasses.replace(self._plan.spec, dtype="bfloat16"))

    @functools.cached_property
    def device_bytes_16(self) -> int:
        """Bytes on the device as if keys and values had 16 bits."""
        layers = collections.Counter((policy, self.plan_16.spec_of(i)) for i, policy in enumerate(self.plan_16.policies))
        sizes = {layer: nbytes(jax.eval_shape(functools.partial(layer[0].init, layer[1]))) for layer in layers}
        return sum(count * sizes[layer] for layer, count in layers.items())

    def bytes_16(self, fetched: float) -> dict[str, int]:
        """Returns bytes on the device, in host memory, and moved per step, as if keys and values had 16 bits.

        Args:
            fetched: mean number of pages or slots fetched per step.
        """
        plan, extents = self.plan_16, self.extents
        if plan.pooled and getattr(policy := plan.policies[plan.pooled[0]], "look", None):  # codes count as slots of fp32
            units = fetched_per_step(policy, plan.prompt_pages + plan.growth_pages, plan)
            fetched = units * len(plan.pooled) * plan.spec.num_kv_heads
        return dict(
            device_bytes=self.device_bytes_16,
            host_bytes=pool_bytes(pool_shapes(*plan.pool_sizes(extents))) if extents else 0,
            moved_bytes=round(fetched * fetched_bytes(plan)),
        )


def divergence(exact: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Returns the KL divergence of the softmax of `logits` from that of `exact`, in nats, f64[tokens]."""
    p, q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (exact.astype(np.float64), logits.astype(np.float64)))
    return (np.exp(p) * (p - q)).sum(-1)


def run(
    name: str, model: CausalLM, tokenizer: Any, *, lengths: Sequence[int], tasks: Sequence[str], questions: int,
    contenders: dict[int, list[Contender]], path: Path
) -> Iterator[str]:  # fmt: skip
    """Adds the missing lines of a model to a file; yields a description of every line, missing or not.

    A line of another text of the same number, as another version of Python has, counts as missing, and a line of other weights.

    Args:
        name: the model's name.
        questions: per task and length.
        contenders: by length.
    """
    weights = weights_sum(model)
    old_lines = cells.of_model(lines(path), name, weights)
    for length in lengths:
        for group in groups(model, length, tasks, questions):
            adaptive = Adaptive(model, tokenizer, length)
            documents = {text: _document(tokenizer, *text, length=length) for text in group}
            crcs = {text: zlib.crc32(repr(document).encode()) for text, document in documents.items()}
            asked: dict[tuple[str, int], list[Asked]] = {}
            for contender in contenders[length]:
                subject = options = None
                for text, document in documents.items():
                    for number in range(min(len(document.questions), questions - text[1] * texts.QUESTIONS)):
                        key, crc = (name, contender.name, contender.asked, length, *text, number), crcs[text]
                        if old_lines.get(key, {}).get("crc") != crc:
                            if text not in asked:
                                exact = Text.read(model, document.tokens)
                                asked[text] = [Asked.of(exact, question) for question in document.questions]
                            if subject is None:
                                options = adaptive.options(contender, [*old_lines.values()])
                                policy = make_policy(contender.name, options) if options else contender.policy
                                subject = Forced(model, policy, length=length)
                            line = dict(zip(KEY, key, strict=True)) | dict(tokens=contender.tokens, crc=crc, options=options)
                            line |= subject.figures(asked[text][number])
                            line |= dict(weights=weights, device=devices.device_name(), jax=jax.__version__)
                            cells.add(path, line)
                            old_lines[key] = line
                        yield f"{name}, {length}: {contender.name}, {contender.asked}"
                if subject is not None:
                    del subject
                    jax.clear_caches()  # the programs of many subjects need more mappings than Linux allows


def groups(model: CausalLM, length: int, tasks: Sequence[str], questions: int) -> Iterator[list[tuple[str, int]]]:
    """Yields tasks and numbers of texts in groups that fit into TEXT_BYTES together; all tasks have turns."""
    config = model.config
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
    text_bytes = 4 * heads * config.head_dim * config.num_hidden_layers * length
    all_texts = [(task, number) for number in range(-(-questions // texts.QUESTIONS)) for task in tasks]
    size = max(1, TEXT_BYTES // text_bytes)
    for first in range(0, len(all_texts), size):
        yield all_texts[first : first + size]


def _document(tokenizer: Any, task: str, number: int, *, length: int) -> texts.Document:
    return texts.document(tokenizer, task, tokens=length - SHORT, number=number)


class Adaptive:
    """Options of adaptive policies that attend to the budget on a text of no table, which all searches share."""

    def __init__(self, model: CausalLM, tokenizer: Any, length: int) -> None:
        self._model, self._tokenizer, self._length = model, tokenizer, length

    def options(self, contender: Contender, known: list[dict]) -> dict[str, float]:
        """Returns the options of an adaptive policy; none for other policies.

        Args:
            known: lines of the same model, whose options are used again.
        """
        if contender.name not in tuned.KNOBS:
            return {}
        key = contender.name, contender.asked, self._length
        for line in known:
            if (line["policy"], line["budget"], line["length"]) == key and line["options"]:
                return line["options"]
        knob = tuned.KNOBS[contender.name]
        try:
            return tuned.search(knob, contender.tokens, (self._by_number if knob.traced else self._by_policy)(contender))
        finally:
            jax.clear_caches()  # a search may compile a program for each of its trials

    @functools.cached_property
    def _asked(self) -> Asked:
        document = _document(self._tokenizer, texts.TASKS[0], texts.FAR, length=self._length)
        return Asked.of(Text.read(self._model, document.tokens), document.questions[0])

    def _by_number(self, contender: Contender) -> Callable[[dict[str, float]], float]:
        """Returns the function from options to attended tokens, of one program that takes the option as a number."""
        knob, asked = tuned.KNOBS[contender.name], self._asked
        policy = make_policy(contender.name, knob.options(knob.start, contender.tokens))
        subject = Forced(self._model, policy, length=self._length)
        subject.read_question(asked)

        def attended(options: dict[str, float]) -> float:
            number = {knob.option: options[knob.option]}
            return subject.attended(subject.measure(asked.answered, len(asked.continuation) - 1, number))

        return attended

    def _by_policy(self, contender: Contender) -> Callable[[dict[str, float]], float]:
        def attended(options: dict[str, float]) -> float:
            subject = Forced(self._model, make_policy(contender.name, options), length=self._length)
            return subject.attended(subject.measured(self._asked))

        return attended


def lines(path: Path) -> dict[tuple, dict]:
    """Returns the lines of a file by KEY, without lines that were cut off."""
    return cells.lines(path, key=KEY, fields={*KEY, *FIGURES, "tokens", "crc", "options"})
