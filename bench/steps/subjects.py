"""The caches that `bench.decode` times: each has a cache of a chosen length and decodes one token per step."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import icejax
from bench.steps import shapes
from bench.steps.fill import fill
from bench.steps.scopes import scope_of
from bench.steps.sizes import fetched_bytes, nbytes
from icejax.cache.bases.all_tokens import TokenState
from icejax.cache.pool.page_format import pool_bytes
from icejax.cache.protocol import Heads, Outcome, View
from icejax.cache.registry import Full
from icejax.engine.decode.counters import StepCounters
from icejax.engine.decode.step import DecodePrograms, StepParts
from icejax.engine.plan import Plan, make_plan, reports
from icejax.engine.prefill import prefill
from icejax.models.decoder import CausalLM
from icejax.ops.attention.dense import Attended
from icejax.ops.slots import append, split_heads

WARM_UP = 17  # fewest steps: a page of 16 leaves the window, which compiles its programs


@dataclass(frozen=True)
class DotProduct(Full):
    """A plain JAX cache, for comparison: one buffer of all tokens and `jax.nn.dot_product_attention`."""

    def decode(self, state: TokenState, heads: Heads, view: View) -> Outcome:
        seen = view.lengths.seen
        k, v = (append(old, new[:, 0], seen) for old, new in ((state.k, heads.k), (state.v, heads.v)))
        keys, values = (split_heads(x, heads.k.shape[2]).swapaxes(1, 2) for x in (k, v))
        out = jax.nn.dot_product_attention(heads.q, keys, values, key_value_seq_lengths=seen + 1, scale=heads.scoring.scale)
        return Outcome(TokenState(k, v), Attended(out, jnp.zeros(out.shape[:3])))


class Icejax:
    """One of our policies on a model.

    Attributes:
        warm_up: steps that compile every program which the next `steps` steps call.
    """

    def __init__(
        self, model: CausalLM, policy: icejax.CachePolicy, *, context: int, batch: int, steps: int, filled: bool
    ) -> None:
        plan = functools.partial(make_plan, model, policy, batch_size=batch, prompt_tokens=context)
        self.warm_up = _warm_up(plan(new_tokens=steps), steps)
        self._plan = plan(new_tokens=1 + self.warm_up + steps)
        started, self.ttft_s, self.fill_s = time.perf_counter(), None, None
        if filled:
            self._state, self._pool = fill(model, self._plan, policy, context=context)
            self.fill_s = round(time.perf_counter() - started, 3)
        else:
            prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, context)).tolist()
            self._state, step, self._pool = prefill(model, prompts, self._plan)
            step.logits.block_until_ready()
            self.ttft_s = round(time.perf_counter() - started, 3)
        self._decoding = DecodePrograms(model, self._plan)
        self._policy, self._model = policy, model
        self._brought, self._fetched = None, []

    def step(self) -> None:
        """Starts a step and then reads the counters of the step before, as `icejax.engine.decode.loop` does."""
        previous_step = self._brought
        self._state, self._brought, self._pool = self._decoding.step(self._state, self._pool)
        if previous_step is not None:
            self._fetched.append(int(StepCounters.read(previous_step.counters).pages_fetched.sum()))

    def rest(self) -> None:
        """Waits until the last started step is done."""
        jax.block_until_ready(self._brought)

    def scopes(self) -> dict[str, dict[str, str]]:
        """Takes a step; returns the named scope of every instruction of its programs, by program and instruction."""
        scopes, programs_read, programs, model = {}, set(), self._decoding.programs, self._model

        def read(program: Callable, paths: list[str]) -> Callable:
            def run(*arguments: Any) -> Any:
                if program not in programs_read:
                    programs_read.add(program)
                    hlo = program.lower(*arguments).compile().as_text()
                    scopes[re.match(r"HloModule ([\w.]+)", hlo)[1]] = scope_of(hlo, paths)
                return program(*arguments)

            return run

        if isinstance(programs, StepParts):
            layers = [
                part._replace(program=read(part.program, _paths(layer)))
                for part, layer in zip(programs.layers, model.model.layers, strict=True)
            ]
            ends = dict(begin=read(programs.begin, _paths(model.ends)), finish=read(programs.finish, _paths(model.ends)))
            self._decoding.programs = programs._replace(layers=layers, **ends)
        else:
            self._decoding.programs = programs._replace(program=read(programs.program, _paths(nnx.state(model))))
        self.step()
        self._decoding.programs = programs
        return scopes

    def row(self) -> dict:
        """Returns sizes in bytes over the whole batch, and mean numbers of device slots per row, layer and KV head."""
        plan, layers, lengths = self._plan, self._state.cache.layers, self._state.cache.lengths
        layer_reports = reports(plan, self._state.cache)
        digests, heads = sum(report.digest_bytes for report in layer_reports), len(layers) * plan.spec.num_kv_heads
        used = [policy.report(layer, lengths).slots for policy, layer in zip(plan.policies, layers, strict=True)]
        return dict(
            budget=self._policy.budget,
            ttft_s=self.ttft_s,
            fill_s=self.fill_s,
            weight_bytes=nbytes(jax.tree.leaves(self._model)),
            device_kv_bytes=sum(x.nbytes for x in jax.tree.leaves(layers)) - digests,
            digest_bytes=digests,
            slots_used=float(np.mean(used)) * len(layers) / heads,
            slots_allocated=sum(report.allocated for report in layer_reports) / heads,
            host_kv_bytes=pool_bytes(self._pool),
            moved_bytes_per_step=int(np.median(self._fetched) * fetched_bytes(plan)),
            dtype=self._model.dtype,
            version=f"jax {jax.__version__}",
        )


def _paths(module: Any) -> list[str]:
    """Returns the paths of a module's weights, in the order of a program's parameters."""
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(module)]


def _warm_up(plan: Plan, steps: int) -> int:
    compact = plan.compact_every if plan.compact_every <= WARM_UP + steps else 0
    return max(WARM_UP, 1 + plan.page_size, 1 + compact)


class Transformers:
    """Hugging Face's own caches on PyTorch, with random weights of a shape and random keys and values.

    `kvpress` is its SnapKV (arXiv 2404.14469), which prefills a random prompt and keeps `budget` of its tokens. It needs a
    separate environment, because `pip install kvpress` installs a transformers before 5.3.
    """

    warm_up = WARM_UP

    def __init__(self, config: dict, cache: str, *, budget: int, context: int, batch: int, steps: int) -> None:
        import torch
        from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

        self._torch, self._ttft_s, self._budget = torch, None, budget if cache == "kvpress" else None
        llama_config = LlamaConfig(**shapes.as_llama(config), attn_implementation="sdpa")
        torch.manual_seed(0)
        with torch.no_grad():
            self._model = LlamaForCausalLM(llama_config).eval()
            head_size = getattr(llama_config, "head_dim", llama_config.hidden_size // llama_config.num_attention_heads)
            shape = (batch, llama_config.num_key_value_heads, context, head_size)
            if cache == "static":
                self._cache = StaticCache(llama_config, max_cache_len=context + self.warm_up + steps)
            else:
                self._cache = DynamicCache(config=llama_config)
            if cache == "kvpress":
                self._compress(torch.randint(llama_config.vocab_size, (batch, context)), budget)
            else:
                for layer in range(llama_config.num_hidden_layers):
                    self._cache.update(torch.randn(shape), torch.randn(shape), layer)
        self._run = torch.compile(self._model) if cache == "static" else self._model
        self._token, self._at = torch.zeros((batch, 1), dtype=torch.long), context

    def _compress(self, prompt, budget: int) -> None:
        from kvpress import SnapKVPress

        started = time.perf_counter()
        with SnapKVPress(compression_ratio=max(0.0, 1 - budget / prompt.shape[1]))(self._model):
            self._model(prompt, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._ttft_s = round(time.perf_counter() - started, 3)

    def step(self) -> None:
        """Decodes a token."""
        torch = self._torch
        with torch.no_grad():
            out = self._run(self._token, past_key_values=self._cache, use_cache=True, position_ids=torch.tensor([[self._at]]))
            self._token, self._at = out.logits[:, -1:].argmax(-1), self._at + 1

    def rest(self) -> None:
        """Does nothing: a step of PyTorch is done when it returns."""

    def row(self) -> dict:
        """Returns sizes in bytes over the whole batch."""
        import transformers

        cache_bytes = sum(x.nbytes for layer in self._cache.layers for x in (layer.keys, layer.values))
        return dict(
            budget=self._budget, filled=self._ttft_s is None, ttft_s=self._ttft_s,
            weight_bytes=sum(x.nbytes for x in self._model.parameters()),
            device_kv_bytes=cache_bytes, digest_bytes=0, host_kv_bytes=0, moved_bytes_per_step=0, dtype="float32",
            version=f"transformers {transformers.__version__}, torch {self._torch.__version__}",
        )  # fmt: skip
