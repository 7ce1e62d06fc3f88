"""Exact prefill of a prompt, computed once for many caches.

Prefill attends exactly whatever the cache, so its queries, keys and values are those of every policy. Inside `shared_prefill`
the engine builds each cache of them by its own code, and decodes with its own programs.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.compare.text import exact
from icejax.cache.protocol import CachePolicy, Heads
from icejax.cache.sizes import CacheSpec
from icejax.engine import prefill
from icejax.engine.layers import embed, run_layers
from icejax.engine.plan import Plan
from icejax.models.decoder import CausalLM, DecoderLayer
from icejax.runtime.mesh import home

IN_MEMORY = 4 * 2**30  # most bytes of a prompt's heads that stay in memory


@dataclass(frozen=True)
class ExactText:
    """The exact attention over a prompt.

    Attributes:
        layers: per layer the queries, keys and values, and what they attended to, padded on the right; in memory, or in files
            where they take more than `IN_MEMORY`.
        last: the last layer's output, f32[1, T, D].
    """

    model: CausalLM
    prompt: tuple[int, ...]
    layers: tuple[Any, ...]
    last: jax.Array

    @classmethod
    def read(cls, model: CausalLM, prompt: tuple[int, ...], spec: CacheSpec, folder: Path) -> ExactText:
        """Computes the exact attention over a prompt, padded as the engine pads it; `folder` is for files."""
        lengths, layers = prefill.lengths_of([prompt]), []
        padded = jnp.asarray(prefill.padded_prompts([prompt], spec))
        run = lambda layer, x, _: (*exact(layer, x, lengths), None)  # noqa: E731
        # Committed to the device, as the engine's prefill has it, or what takes the results compiles twice.
        for x, heads in run_layers(model, jax.device_put(embed(model, padded), home(None)), run):
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(heads)) * len(model.model.layers)
            layers.append(heads if size <= IN_MEMORY else _in_files(heads, folder))
            x.block_until_ready()
        return cls(model, prompt, tuple(layers), x)

    def under(self, plan: Plan) -> Iterator[tuple[jax.Array, tuple[Any, Any]]]:
        """Yields what `prefill.prefill_layers` yields for a plan: outputs, and each layer's state and pages."""
        lengths, shared = prefill.lengths_of([self.prompt]), None
        for i, (layer, heads) in enumerate(zip(self.model.model.layers, self.layers, strict=True)):
            heads, attended = jax.device_put(heads, home(None))
            options = dict(policy=plan.policies[i], spec=plan.spec_of(i))
            outcome = _kept(layer, heads, attended, lengths, shared, **options)
            shared = outcome.shared or shared
            yield self.last, (outcome.state, outcome.pages)


@functools.partial(jax.jit, static_argnames=("policy", "spec"))
def _kept(layer: DecoderLayer, heads, attended, lengths: jax.Array, shared, *, policy: CachePolicy, spec: CacheSpec):
    return prefill.prefill_outcome(layer, Heads(*heads, lengths, layer.scoring), attended, shared, policy=policy, spec=spec)


def _in_files(heads: Any, folder: Path) -> Any:
    """Returns the arrays as files that are read when they are used."""

    def stored(x: jax.Array) -> np.ndarray:
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".npy", delete=False) as file:
            np.save(file, np.asarray(x))
        return np.load(file.name, mmap_mode="r")

    return jax.tree.map(stored, heads)


@contextlib.contextmanager
def shared_prefill(count: int, folder: Path) -> Iterator[None]:
    """While the block runs, the exact attention over the first `count` prompts is computed once, whatever prefills them.

    Args:
        folder: where files may stand until the block ends.
    """
    texts: dict[tuple[int, ...], ExactText] = {}
    engines = prefill.prefill_layers

    def layers(model: CausalLM, prompts: Sequence[Sequence[int]], plan: Plan):
        prompt = tuple(prompts[0])
        if prompt not in texts:
            if len(texts) == count or len(prompts) > 1:
                return engines(model, prompts, plan)
            texts[prompt] = ExactText.read(model, prompt, plan.spec, Path(scratch))
        return texts[prompt].under(plan)

    with tempfile.TemporaryDirectory(dir=folder, prefix=".heads-") as scratch:
        prefill.prefill_layers = layers  # the one place through which generate and Session prefill
        try:
            yield
        finally:
            prefill.prefill_layers = engines
