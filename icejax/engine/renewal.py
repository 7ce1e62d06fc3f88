"""LongRoPE's second set of factors: a row that outgrows the original context is prefilled again, because all its keys change.

The decode loop calls it. A text within the original context has the short factors in all keys, a longer one the long factors,
as in transformers.

Example: the original context has 4,096 tokens, the prompt 4,000. The answer's token 97 makes a text of 4,097 tokens: in place
of a decode step with it, the whole text is prefilled, and that chooses token 98.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from icejax.cache.pool.host_pool import Pool
from icejax.cache.protocol import KVCache, Lengths
from icejax.engine.batch import extract
from icejax.engine.decode.state import DecodeState, Step
from icejax.engine.first_token import choose_first
from icejax.engine.plan import Plan
from icejax.engine.prefill import keep_layers, prefill_layers
from icejax.models.decoder import CausalLM

LOG = logging.getLogger(__name__)


def without_cache(state: DecodeState, at: int) -> DecodeState:
    """Returns the row in the place `at` as a batch of one, without its layers' caches.

    The row keeps its extents, its sampling options and its random key, so that its draws continue as if nothing had happened.
    """
    return extract(replace(state, cache=replace(state.cache, layers=())), at)[1]


def renewed(
    model: CausalLM, plan: Plan, row: DecodeState, text: Sequence[int], pool: Pool | None
) -> tuple[DecodeState, Step, jax.Array | None]:
    """Returns the state of one row after its whole `text` was prefilled, the step that chose its next token, and the pool.

    Donates the row and the pool.

    Args:
        plan: the plan of the row's batch.
        row: the row from `without_cache`.
    """
    LOG.info("a text of %d tokens outgrows the model's original context: it is prefilled again", len(text))
    plan = replace(plan, spec=replace(plan.spec, batch_size=1))
    x, layers, pool = keep_layers(prefill_layers(model, [text], plan), plan, pool, row.cache.table)
    lengths = jnp.asarray([len(text)], jnp.int32)
    cache = KVCache(layers, Lengths.of(jnp.copy(lengths), plan.prompt_pages), row.cache.table)  # the cache's own are donated
    return *choose_first(model, x, lengths, replace(row, cache=cache), plan), pool
