"""Runs a model on token ids: all logits of a prompt, and greedy decoding step by step.

For tests that compare logits with a reference model. `jitted` runs any function as one compiled program.
"""

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
from icejax.engine.decode.counters import StepCounters
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.layers import LayerPlace, embed, run_layers
from icejax.engine.plan import Plan, make_plan
from icejax.engine.prefill import prefill
from icejax.models.decoder import CausalLM, DecoderLayer
from icejax.ops.experts.offloaded_experts import with_experts_on_device
from tests import tolerances


def jitted(function: Callable, *arrays: Any, **static: Any) -> Any:
    """Returns `function(*arrays, **static)`, traced again and run as one program; that compiles faster than op by op."""
    return jax.jit(functools.partial(function, **static))(*arrays)


def all_logits(model: CausalLM, prompt: Sequence[int], policy: CachePolicy) -> np.ndarray:
    """Returns the logits f32[T, V] at every position of `prompt`, computed with the engine's prefill of a layer."""
    plan = plan_for(model, policy, [prompt], 1)
    padded = np.zeros((1, plan.spec.prompt_capacity), np.int32)
    padded[0, : len(prompt)] = prompt
    lengths = jnp.asarray([len(prompt)], jnp.int32)

    def run(layer: DecoderLayer, x: jax.Array, place: LayerPlace):
        sizes = dict(policy=plan.policies[place.number], spec=plan.spec_of(place.number))
        return prefilling._prefill_layer(with_experts_on_device(layer), x, lengths, None, **sizes)[:3]

    *_, (x, _) = run_layers(model, embed(model, jnp.asarray(padded)), run)
    return np.asarray(_logits(model, x))[0, : len(prompt)]


_logits = jax.jit(lambda model, x: model.logits(x))


def plan_for(model: CausalLM, policy: CachePolicy, prompts: Sequence[Sequence[int]], new_tokens: int) -> Plan:
    """Returns the plan of generating `new_tokens` behind each of `prompts`."""
    longest = max(map(len, prompts))
    return make_plan(model, policy, batch_size=len(prompts), prompt_tokens=longest, new_tokens=new_tokens)


def greedy(
    model: CausalLM, policy: CachePolicy, prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Decodes greedily; returns tokens i32[B, n], logits f32[n, B, V], and the number of pages attended i32[n, B]."""
    plan = plan_for(model, policy, prompts, new_tokens)
    state, step, pool = prefill(model, prompts, plan)
    decoding, steps = DecodePrograms(model, plan), [step]
    for _ in range(new_tokens - 1):
        state, step, pool = decoding.step(state, pool)
        steps.append(step)
    counters = [StepCounters.read(step.counters) for step in steps]
    tokens, pages = (np.stack([getattr(step, name) for step in counters]) for name in ("token", "pages_attended"))
    return tokens.T, np.stack([np.asarray(step.logits) for step in steps]), pages


def follows(model: CausalLM, policy: CachePolicy, tokens: Sequence[int], expected: np.ndarray, *, prompt: int, decoded: int):
    """Asserts that logits equal `expected` through prefill, `decoded` steps, extend and `decoded` more steps.

    `tokens` are fed throughout; the first `prompt` are prefilled, and those between the two stretches of steps are extended.
    """
    extended = len(tokens) - prompt - 2 * decoded
    assert_close = functools.partial(np.testing.assert_allclose, rtol=0, atol=tolerances.LOGITS)
    assert_close(all_logits(model, tokens[:prompt], policy), expected[:prompt])
    plan = plan_for(model, policy, [tokens[:prompt]], 1000)
    decoding = DecodePrograms(model, plan)
    state, step, pool = prefilling.prefill(model, [tokens[:prompt]], plan)
    position = prompt
    for num_new in (extended, 0):
        assert_close(step.logits[0], expected[position - 1])
        for token in tokens[position : position + decoded]:
            state = dataclasses.replace(state, last_tokens=jnp.asarray([token], jnp.int32))
            state, step, pool = decoding.step(state, pool)
            assert_close(step.logits[0], expected[position])
            position += 1
        if num_new:
            assert plan.room_for_answer(num_new, pages=int(state.cache.lengths.next_page)) >= decoded
            state, step, pool = extending.extend(model, tokens[position : position + num_new], plan, state, pool)
            decoding.clock, position = 0, position + num_new
    assert position == len(tokens)
