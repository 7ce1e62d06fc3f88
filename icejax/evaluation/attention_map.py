"""Which positions of a prompt an answer looked at: a picture and a table of what each layer attended to exactly."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.bases.retrieval import PagedState
from icejax.cache.protocol import CachePolicy, Heads, Outcome
from icejax.cache.sizes import CacheSpec
from icejax.checks.errors import InputError
from icejax.engine.decode_step import DecodeState
from icejax.engine.layers import LayerPlace, run_exact, run_layers
from icejax.engine.plan import Plan, make_plan
from icejax.engine.prefill import kept
from icejax.models.decoder import CausalLM, DecoderLayer
from icejax.ops.attention.dense import Attended
from icejax.ops.experts.offloaded_experts import with_experts_on_device

BINS = 480  # columns of the picture


class Explanation:
    """Adds up, step by step, the attention that each position of one prompt had, where it was attended to exactly.

    Attributes:
        weights: layer -> f64[S], summed over decode steps and query heads; sinks and window are left out.
        steps: decode steps so far.
    """

    def __init__(self, model: CausalLM, prompt: Sequence[int], cache: CachePolicy, *, new_tokens: int) -> None:
        """Runs the prompt to learn which positions stand in which page.

        Args:
            prompt: token ids.
            new_tokens: at most; as in the generation that is explained.

        Raises:
            InputError: the cache keeps all tokens on the device, so that there is nothing to explain.
        """
        model = model.for_capacity(len(prompt) + new_tokens)
        plan = make_plan(model, cache, batch_size=1, prompt_tokens=len(prompt), new_tokens=new_tokens)
        if not plan.pooled:
            raise InputError("--explain shows what is fetched from the host: it needs pages there, as of --cache clustered")
        self._positions = _positions(model, prompt, plan)
        self.weights = {layer: np.zeros(len(prompt)) for layer in plan.pooled}
        self.steps = 0

    def watch(self, state: DecodeState) -> None:
        """Adds one step; to be given to `stream_generate`."""
        self.steps += 1
        for layer, total in self.weights.items():
            newest: PagedState = state.cache.layers[layer]
            pages, weights = np.asarray(newest.ids)[0], np.asarray(newest.weights)[0]
            of = self._positions[layer].reshape(len(pages), -1, weights.shape[-1])  # K P p, or K slots 1
            for head in range(len(pages)):
                # The others hold generated tokens, or are not known since a compaction.
                inside = (pages[head] >= 0) & (pages[head] < of.shape[1]) & (weights[head] > 0).any(-1)
                kept = weights[head][inside]
                np.add.at(total, of[head, pages[head][inside]][kept > 0], kept[kept > 0])

    def save(self, picture: Path) -> None:
        """Writes the picture, and the same figures beside it as JSON, neither of them in part; InputError if that fails."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
        from matplotlib.colors import LogNorm

        layers, tokens = sorted(self.weights), len(next(iter(self.weights.values())))
        edges = np.linspace(0, tokens, min(BINS, tokens) + 1).astype(int)
        heat = np.stack([np.add.reduceat(self.weights[layer], edges[:-1]) for layer in layers]) / max(1, self.steps)
        figure, axes = plt.subplots(figsize=(11, 1.6 + 0.28 * len(layers)), layout="constrained")
        extent = (0, tokens, len(layers) - 0.5, -0.5)
        norm = LogNorm(vmin=1e-3 * heat.max() or 1.0, vmax=heat.max() or 2.0, clip=True)
        shown = axes.imshow(heat, aspect="auto", interpolation="nearest", cmap="magma", extent=extent, norm=norm)
        axes.set(xlabel="position in the prompt", ylabel="layer", yticks=range(len(layers)), yticklabels=layers)
        axes.set_title(f"attention to tokens from the host, summed over query heads, mean of {self.steps} steps")
        figure.colorbar(shown, ax=axes)
        rows = {
            str(layer): {str(i): float(f"{weights[i]:.4g}") for i in np.flatnonzero(weights)}
            for layer, weights in self.weights.items()
        }
        told = json.dumps(dict(prompt_tokens=tokens, steps=self.steps, layers=rows))
        parts = {path.with_name(f".{path.name}.part"): path for path in (picture, picture.with_suffix(".json"))}
        try:
            with contextlib.ExitStack() as stack:
                for part in parts:
                    stack.callback(part.unlink, missing_ok=True)
                drawn, table = parts
                figure.savefig(drawn, dpi=110, format=picture.suffix[1:])
                table.write_text(told)
                for part, path in parts.items():
                    os.replace(part, path)
        except OSError as error:
            raise InputError(f"--explain: {picture} cannot be written: {error.strerror}") from None
        finally:
            plt.close(figure)


def check_picture(picture: Path) -> None:
    """Raises InputError if a picture cannot be written to `picture`, before anything runs."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError("--explain draws with matplotlib, which is not installed: pip install matplotlib") from None
    if picture.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"--explain needs a file that ends in .png, .svg or .pdf, got {picture}")
    for path in (picture, picture.with_suffix(".json")):
        part = path.with_name(f".{path.name}.part")
        try:
            if not path.absolute().parent.is_dir():
                raise InputError(f"--explain: there is no folder {path.absolute().parent}")
            if path.is_dir():
                raise InputError(f"--explain: {path} is a folder: name a file")
            part.touch()
            part.unlink()
        except OSError as error:
            raise InputError(f"--explain: {path} cannot be written: {error.strerror}") from None


def _positions(model: CausalLM, prompt: Sequence[int], plan: Plan) -> dict[int, np.ndarray]:
    """Returns, for every layer with pages, the positions i32[K, P, p] of their tokens."""
    padded = np.zeros((1, plan.spec.prompt_capacity), np.int32)
    padded[0, : len(prompt)] = prompt
    new = jnp.asarray([len(prompt)], jnp.int32)

    def run(layer: DecoderLayer, x: jax.Array, at: LayerPlace):
        policy = plan.policies[at.number] if at.number in plan.pooled else None
        # With a plane for the positions, which 16 bits do not hold; tokens are packed by their keys in 32 bits always.
        spec = replace(plan.spec_of(at.number), latent=False, dtype="float32")
        return _layer(with_experts_on_device(layer), x, new, at.shared, policy=policy, spec=spec)

    positions = {}
    for i, (_, pages) in enumerate(run_layers(model, model.model.embed_tokens(jnp.asarray(padded)), run)):
        if pages is not None:
            positions[i] = np.asarray(pages)[:, 0, :, 1, :, 0].transpose(1, 0, 2).astype(np.int32)
    return positions


@functools.partial(jax.jit, static_argnames=("policy", "spec"), donate_argnames="x")
def _layer(layer: DecoderLayer, x: jax.Array, new: jax.Array, shared, *, policy: CachePolicy | None, spec: CacheSpec):
    """Runs a layer, and packs its keys with their positions in the place of their values, if a policy packs them."""
    if policy is None:
        return run_exact(layer, x, new)[0], None, shared

    def keep(q: jax.Array, k: jax.Array, v: jax.Array, attended: Attended) -> Outcome:
        where = jnp.broadcast_to(jnp.arange(k.shape[1], dtype=jnp.float32)[None, :, None, None], v.shape)
        heads = Heads(q.astype(jnp.float32), k.astype(jnp.float32), where, new, layer.scoring)
        return kept(layer, heads, attended, shared, policy=policy, spec=spec)

    x, outcome = run_exact(layer, x, new, keep)
    return x, outcome.pages, outcome.shared or shared
