"""Runs a model without text: all logits of a prompt, and greedy decoding step by step; and any function as one program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.protocol import CachePolicy
from icejax.engine import extend as extending
from icejax.engine import prefill as prefilling
from icejax.engine.counters import StepCounters
from icejax.engine.decode_step import DecodePrograms
from icejax.engine.layers import LayerPlace, embed, run_layers
from icejax.engine.plan import Plan, make_plan
from icejax.engine.prefill import prefill
from icejax.models.decoder import CausalLM, DecoderLayer
from icejax.ops.experts.offloaded_experts import with_experts_on_device
from tests import tolerances


def jitted(function: Callable, *arrays: Any, **static: Any) -> Any:
    """Returns `function(*arrays, **static)`, traced anew and run as one program: op by op each would be compiled apart."""
    return jax.jit(functools.partial(function, **static))(*arrays)


def all_logits(model: CausalLM, prompt: Sequence[int], policy: CachePolicy) -> np.ndarray:
    """Returns the logits f32[T, V] at every position of `prompt`, by the programs of `prefill`."""
    model = model.for_capacity(len(prompt))
    plan = plan_for(model, policy, [prompt], 1)
    padded = np.zeros((1, plan.spec.prompt_capacity), np.int32)
    padded[0, : len(prompt)] = prompt
    new = jnp.asarray([len(prompt)], jnp.int32)

    def run(layer: DecoderLayer, x: jax.Array, at: LayerPlace):
        sizes = dict(policy=plan.policies[at.number], spec=plan.spec_of(at.number))
        return prefilling._prefill_layer(with_experts_on_device(layer), x, new, None, **sizes)[:3]

    *_, (x, _) = run_layers(model, embed(model, jnp.asarray(padded)), run)
    return np.asarray(_logits(model, x))[0, : len(prompt)]


_logits = jax.jit(lambda model, x: model.logits(x))


def plan_for(model: CausalLM, policy: CachePolicy, prompts: Sequence[Sequence[int]], new_tokens: int) -> Plan:
    """Returns the plan of a greedy generation."""
    longest = max(map(len, prompts))
    return make_plan(model, policy, batch_size=len(prompts), prompt_tokens=longest, new_tokens=new_tokens)


def greedy(
    model: CausalLM, policy: CachePolicy, prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the tokens i32[B, n], the logits f32[n, B, V] each was chosen from, and the pages attended i32[n, B]."""
    model = model.for_capacity(max(map(len, prompts)) + new_tokens)
    plan = plan_for(model, policy, prompts, new_tokens)
    state, step, pool = prefill(model, prompts, plan)
    decoding, steps = DecodePrograms(model, plan), [step]
    for _ in range(new_tokens - 1):
        state, step, pool = decoding.step(state, pool)
        steps.append(step)
    counters = [StepCounters.read(each.counters) for each in steps]
    tokens, pages = (np.stack([getattr(each, name) for each in counters]) for name in ("token", "pages_attended"))
    return tokens.T, np.stack([np.asarray(each.logits) for each in steps]), pages


def follows(model: CausalLM, policy: CachePolicy, tokens: Sequence[int], expected: np.ndarray, *, prompt: int, decoded: int):
    """Asserts that the logits of a prompt, of tokens decoded behind it, of a text behind these and of more are `expected`."""
    extended = len(tokens) - prompt - 2 * decoded
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=tolerances.LOGITS)
    close(all_logits(model, tokens[:prompt], policy), expected[:prompt])
    plan = plan_for(model, policy, [tokens[:prompt]], 1000)
    decoding = DecodePrograms(model, plan)
    state, step, pool = prefilling.prefill(model, [tokens[:prompt]], plan)
    at = prompt
    for more in (extended, 0):
        close(step.logits[0], expected[at - 1])
        for token in tokens[at : at + decoded]:
            state = dataclasses.replace(state, last_tokens=jnp.asarray([token], jnp.int32))
            state, step, pool = decoding.step(state, pool)
            close(step.logits[0], expected[at])
            at += 1
        if more:
            assert plan.room_for_answer(more, pages=int(state.cache.lengths.next_page)) >= decoded
            state, step, pool = extending.extend(model, tokens[at : at + more], plan, state, pool)
            decoding.clock, at = 0, at + more
    assert at == len(tokens)
