"""A policy along a continuation of hundreds of tokens: forced along the full cache's text, and writing a text of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench import texts
from bench.compare.forced import Asked, Forced, divergence
from bench.compare.text import Text
from icejax.cache.bases.retrieval import NOTHING
from icejax.cache.protocol import CachePolicy
from icejax.models.decoder import CausalLM

BIN = 16  # steps that share a mean in a row
PROBED = 16  # steps whose attention is compared with exact attention; in more of them pages would leave the window


@dataclass(frozen=True)
class Prompt:
    """A text with a question after it, which a cache continues.

    Attributes:
        text: the text alone.
        question: tokens of the question.
        before: the text with the question after it.
    """

    text: Text
    question: list[int]
    before: Text

    @classmethod
    def read(cls, model: CausalLM, document: texts.Document) -> Prompt:
        """Computes exact attention over a text and its first question."""
        text, question = Text.read(model, document.tokens), document.questions[0].tokens
        return cls(text, question, text.then(question))

    def continued(self, tokens: Sequence[int]) -> Asked:
        """Returns the prompt with a continuation, and exact attention's logits after each of its tokens."""
        answered = self.text.then([*self.question, *tokens])
        return Asked(list(tokens), self.before, answered, answered.logits()[len(self.question) :])


class Stepwise(Forced):
    """A policy that decodes `steps` tokens after a prompt.

    Attributes:
        logits: the logits of steps that nobody has asked for yet, f32[vocabulary] each.
    """

    def __init__(self, model: CausalLM, policy: CachePolicy, *, length: int, steps: int) -> None:
        super().__init__(model, policy, length=length, new_tokens=steps + 1)
        self.logits: list[np.ndarray] = []

    def _force(self, token: int) -> int:
        chosen = super()._force(token)
        self.logits.append(np.asarray(self._logits[0], np.float32))
        return chosen

    def write(self, token: int, count: int) -> tuple[list[int], list[np.ndarray]]:
        """Returns a token and the `count` tokens that the policy writes after it, and the logits after all but the last.

        The policy's cache does not change.
        """
        tokens = [token, *(self.ask([token], count) if count else [])]
        logits, self.logits = self.logits, []
        return tokens, logits

    def reference(self, prompt: Prompt, steps: int) -> tuple[Asked, dict[str, Any]]:
        """Returns the text of `1 + steps` tokens that the policy writes after a prompt, and the figures of a row.

        Of the full cache, whose text it is, they tell how far decoding alone is from exact attention over the whole text.
        """
        self.read(prompt.before.tokens, prompt.before.under(self._plan))
        tokens, logits = self.write(prompt.before.next, steps)
        asked = prompt.continued(tokens)
        kl = [divergence(*pair) for pair in zip(asked.logits[:-1], logits, strict=True)]
        best = [int(x.argmax()) for x in logits]
        return asked, self.errors(asked) | forced(asked, kl, best) | self.moves([], []) | written(tokens, asked, kl)

    def follow(self, prompt: Prompt, asked: Asked) -> dict[str, Any]:
        """Returns the figures of a row: the policy is forced along a text, and writes its own where it would leave the text.

        Up to there both are the same steps, so they run once.
        """
        self.read_question(asked)
        figures, (first, *later) = self.errors(asked), asked.continuation
        kl, best, brought, same, pages, own = [], [], [], [], [], None
        for token, following, exact in zip((first, *later), later, asked.logits, strict=False):
            self._force(token)
            logits = self.logits.pop()
            kl.append(divergence(exact, logits))
            best.append(int(logits.argmax()))
            brought.append(self._brought)
            before, pages = pages, self.pages()
            same += [len(now & last) / len(now) for now, last in zip(pages, before, strict=False) if now]
            if own is None and best[-1] != following:
                own, own_logits = self.write(best[-1], len(later) - len(kl))
                own = [first, *later[: len(kl) - 1], *own]
        figures |= forced(asked, kl, best) | self.moves(brought, same)
        if own is None:
            return figures | written(asked.continuation, asked, kl)
        own_asked, shared = prompt.continued(own), len(kl) - len(own_logits)
        kl = kl[:shared] + [divergence(*pair) for pair in zip(own_asked.logits[shared:-1], own_logits, strict=True)]
        return figures | written(asked.continuation, own_asked, kl)

    def errors(self, asked: Asked) -> dict[str, float]:
        """Returns the errors of attention in the first steps of a continuation, as `bench.compare.forced` has them."""
        errors = self.measure(asked.answered, steps=PROBED).errors[:, self.layers]
        return dict(error=rounded(errors.mean()), error_95=rounded(np.quantile(errors, 0.95)))

    def pages(self) -> list[set[int]]:
        """Returns the pages of the newest step for each KV head of each layer with pages; a single token counts by its page."""
        found, states = [], self._state.cache.layers
        for layer in self._plan.pooled:
            unit = self._plan.page_size if self._plan.policies[layer].by_slot else 1
            ids = np.asarray(states[layer].ids[0]) // unit  # NOTHING stays as it is
            found += [set(head) - {int(NOTHING)} for head in ids.tolist()]
        return found

    def moves(self, brought: Sequence[int], same: Sequence[float]) -> dict[str, float | None]:
        """Returns what steps fetched, by KV head and layer; None without pages in host memory.

        Args:
            brought: pages or slots that each step fetched.
            same: shares of a step's pages that the step before had too.
        """
        plan = self._plan
        if not brought or not plan.pooled:
            return dict.fromkeys(("moved", "moved_95", "same", "moved_bytes"))
        moved = np.asarray(brought) * plan.pool.unit / plan.page_size / (len(plan.pooled) * plan.spec.num_kv_heads)
        return dict(
            moved=rounded(moved.mean()),
            moved_95=rounded(np.quantile(moved, 0.95)),
            same=rounded(np.mean(same)) if same else None,
            moved_bytes=self.bytes_16(float(np.mean(brought)))["moved_bytes"],
        )


def forced(asked: Asked, kl: Sequence[float], best: Sequence[int]) -> dict[str, list[float]]:
    """Returns KL and agreement along the full cache's text.

    Args:
        kl: KL divergence from exact attention after each token but the last.
        best: the policy's most likely token there.
    """
    return dict(kl=binned(kl), agreement=binned(asked.logits[:-1].argmax(-1) == best))


def written(reference: Sequence[int], own: Asked, kl: Sequence[float]) -> dict[str, Any]:
    """Returns the figures of a policy's own text.

    Args:
        reference: the full cache's text.
        own: the policy's text, with exact attention's logits along it.
        kl: KL divergence from these logits after each token but the last.
    """
    equal = np.equal(own.continuation, reference)
    return dict(
        diverged=None if equal.all() else int(equal.argmin()),
        equal=rounded(equal[1:].mean()),
        own_kl=binned(kl),
        own_agreement=binned(own.logits[:-1].argmax(-1) == own.continuation[1:]),
    )


def binned(values: Any) -> list[float]:
    """Returns the mean of each `BIN` values."""
    return [rounded(x) for x in np.asarray(values, np.float64).reshape(-1, BIN).mean(1)]


def rounded(value: float) -> float:
    """Returns a number with five digits."""
    return float(f"{value:.5g}")
