"""Log-probabilities of a prompt's own tokens, from the last layer's output over it. `serving.start` calls it after a prefill.

The head runs over blocks of tokens, so that the logits of a whole prompt are never made. The host cuts the blocks, or each
padded length would compile a program.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from icejax.engine.decode.logprobs import compiled_count, named, top_logprobs
from icejax.engine.response import TokenLogprobs
from icejax.models.decoder import CausalLM
from icejax.models.parts.vocabulary import Ends
from icejax.runtime.mesh import fetched

BLOCK = 128  # tokens; divides every padded length


def prompt_logprobs(
    model: CausalLM, x: Float[Array, "1 T D"], tokens: Sequence[int], count: int, *, tokenizer: Any
) -> Generator[None, None, list[TokenLogprobs]]:
    """Runs block by block, with a `yield` before each; returns an entry per token but the first.

    An entry is the token's log-probability after the tokens before it, and the `count` most likely tokens there.

    Args:
        x: the last layer's output over the padded prompt, as `layers.embed` cuts it.
        tokens: the prompt, at most T tokens.
    """
    entries, most = list[TokenLogprobs](), compiled_count(count, model.config.vocab_size)
    hidden = fetched(model.mesh, x).reshape(1, -1, model.config.hidden_size)
    for first in range(0, len(tokens) - 1, BLOCK):
        yield
        following = np.asarray(tokens[first + 1 : first + 1 + BLOCK], np.int32)
        padded = np.pad(following, (0, BLOCK - len(following)))
        chosen, best, ids = map(np.asarray, _of_block(model.ends, hidden[:, first : first + BLOCK], padded, count=most))
        rows = zip(following, chosen, ids[:, :count], best[:, :count], strict=False)
        entries += [named(tokenizer, token, value, zip(*top, strict=True)) for token, value, *top in rows]
    return entries


@functools.partial(jax.jit, static_argnames="count")
def _of_block(ends: Ends, x: jax.Array, tokens: jax.Array, *, count: int):
    return top_logprobs(ends.on_devices(Ends.logits, x)[0], tokens, count=count)
