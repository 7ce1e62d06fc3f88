"""Which tokens of an answer may come next, by its grammar and llguidance (https://github.com/guidance-ai/llguidance).

`api.jobs` compiles a grammar for each answer. `engine.decode.row.Row` gives the answer's tokens to its matcher, whose mask goes
to `engine.decode.constrained` before the next token is chosen. The package is in the extra `serve`.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from icejax.checks.errors import InputError, printable
from icejax.checks.numbers import is_unicode
from icejax.text.grammar.rules import Grammar
from icejax.text.grammar.thoughts import before_answer
from icejax.text.tokenizer_errors import tokenizer_error_from

MOST_RULES = 2**18  # characters of a grammar's rules
MOST_REASON = 400  # characters of an error
QUOTED = re.compile(r"\s*(\d* \||\^)")  # lines of an error that quote the rules
_TOKENIZERS: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


class Matcher:
    """The place of one answer in its grammar.

    Attributes:
        mask: u32[W], a bit for each token of the vocabulary, from the lowest bit of the first number: the tokens that may come
            next. An end is among them only where the grammar may end.
        over: whether the answer is complete, so that only its end could follow.
    """

    def __init__(self, matcher: Any, size: int, vocabulary: int) -> None:
        """Computes the first mask.

        Args:
            size: number of the tokenizer's tokens.
            vocabulary: number of the model's.

        Raises:
            InputError: the grammar is broken, can match nothing, or is too large.
        """
        self._matcher, self._sizes, self.over = matcher, (size, vocabulary), False
        self._bits = np.zeros((size + 31) // 32, np.uint32)
        self.mask = np.zeros((vocabulary + 31) // 32, np.uint32)
        self._compute()

    def copy(self) -> Matcher:
        """Returns a matcher of another answer to the same prompt."""
        return Matcher(self._matcher.deep_copy(), *self._sizes)

    def take(self, token: int) -> None:
        """Moves on by a token of the answer, which the mask has.

        Raises:
            InputError: the grammar has become too complex to follow.
        """
        self._matcher.consume_token(token)
        self._check()
        self.over = self._matcher.is_stopped()
        if not self.over:
            self._compute()

    def _compute(self) -> None:
        self._check()
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        count = min(len(self._bits), len(self.mask))
        self.mask = np.zeros_like(self.mask)  # the last one may be on its way to the device
        self.mask[:count] = self._bits[:count]

    def _check(self) -> None:
        if self._matcher.is_error():
            message = self._matcher.get_error().partition("\n<state>")[0].strip()
            reason = " ".join(line.strip() for line in message.splitlines() if not QUOTED.match(line))
            raise InputError(printable(f"the grammar cannot be followed: {reason}")[:MOST_REASON])


def compiled(grammar: Grammar, tokenizer: Any, prompt: Sequence[int], *, eos: Sequence[int], vocabulary: int) -> Matcher:
    """Returns the matcher of an answer to `prompt`.

    Args:
        eos: ids of the tokens that end an answer.
        vocabulary: number of tokens that the model knows.

    Raises:
        InputError: llguidance is not installed or cannot read the tokenizer, or the grammar is broken or too large.
    """
    if len(grammar.rules) > MOST_RULES:
        raise InputError(f"a grammar has {len(grammar.rules)} characters, of at most {MOST_RULES}: shorten its schemas")
    if not is_unicode(grammar.rules):
        raise InputError("a grammar must be Unicode text")
    tokens = prepared(tokenizer, eos)
    from llguidance import LLMatcher

    before = before_answer(tokenizer, prompt, in_message=not grammar.has_marks)
    lark = LLMatcher.grammar_from_lark(f"start: before answer\nbefore: {before}\n{grammar.rules}\n")
    return Matcher(LLMatcher(tokens, lark, log_level=0), tokens.vocab_size, vocabulary)


def prepared(tokenizer: Any, eos: Sequence[int]) -> Any:
    """Returns the tokenizer in llguidance's form, which takes seconds to make and is made once.

    Raises:
        InputError: llguidance is not installed, or cannot read the tokenizer.
    """
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise InputError("grammars need the package llguidance: pip install 'icejax[serve]'") from None
    with _LOCK:
        made, key = _TOKENIZERS.setdefault(tokenizer, {}), tuple(eos)
        if key not in made:
            fast = getattr(tokenizer, "backend_tokenizer", None)
            if fast is None:
                raise InputError("grammars need a tokenizer of the tokenizers library (tokenizer.json): this model has none")
            fields = json.loads(fast.to_str()) | dict(truncation=None, padding=None)
            with tokenizer_error_from("llguidance cannot read the tokenizer"):
                made[key] = LLTokenizer(json.dumps(fields), eos_token=[*key] or None)
        return made[key]
