"""Jobs: the prompts of a core, and the sizes of the core that answers them. `api` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from icejax.engine.decode.row import Row
from icejax.engine.request import AnswerOptions
from icejax.runtime.compile_clock import Mark
from icejax.text.grammar.matcher import Matcher
from icejax.text.grammar.rules import Grammar


@dataclass(frozen=True, kw_only=True)
class Job:
    """A prompt to answer.

    Attributes:
        tokens: the prompt, i32[T].
        options: the options of the answer.
        limit: maximum number of answer tokens.
        draw: seed and index of the row's random key.
        index, number: as in `Row`.
        started: when the caller asked.
        salt: prompts share cached prefixes only with prompts of the same salt.
        sample: number of the answer among the answers to the prompt, from 0.
        samples: number of answers to the prompt.
        forced: tokens of the answer in place of the model's choices; empty: the model answers.
        prompt_logprobs, explain, whole_text: as in `Request`.
        grammar: what the answer's text may be; None: anything.
        matcher: the beginning of the answer in its grammar, for this answer alone; None: it has none.
    """

    tokens: np.ndarray
    options: AnswerOptions
    limit: int
    draw: tuple[int, int]
    index: int
    number: int
    started: Mark
    salt: str = ""
    sample: int = 0
    samples: int = 1
    forced: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    explain: bool = False
    whole_text: bool = False
    grammar: Grammar | None = None
    matcher: Matcher | None = None

    @property
    def reads_prefixes(self) -> bool:
        """Whether the prompt may begin after a cached prefix."""
        return self.prompt_logprobs is None and not self.explain

    def row(self, tokenizer: Any, eos: tuple[int, ...]) -> Row:
        """Returns the record of the row that answers the prompt, whose prefill begins now."""
        options = dict(index=self.index, number=self.number, logprobs=self.options.logprobs, started=self.started)
        options |= dict(sample=self.sample, forced=self.forced, matcher=self.matcher, whole_text=self.whole_text)
        return Row(tokenizer, self.options.stop, eos, self.tokens.tolist(), self.limit, **options)


@dataclass(frozen=True, kw_only=True)
class CoreSizes:
    """The sizes of a core, in rows and tokens.

    Attributes:
        places: rows that decode at once.
        prompt_tokens, new_tokens: most tokens of a prompt, and of its answer.
        prompts: token counts of the longest prompts that the pool holds at once.
        joins: whether a row may get the place of one that has ended.
        samples: whether some prompts have several answers, which share the prompt's pages.
        resizes: whether a step computes only as many places as are used, rounded up to a size of the plan; each size compiles
            programs of its own. False: all places.
        prefix_memory: bytes of host memory for cached prefixes; 0: no store.
        prefix_disk: bytes of the disk for cached prefixes.
    """

    places: int
    prompt_tokens: int
    new_tokens: int
    prompts: tuple[int, ...]
    joins: bool
    samples: bool = False
    resizes: bool = False
    prefix_memory: int = 0
    prefix_disk: int = 0
