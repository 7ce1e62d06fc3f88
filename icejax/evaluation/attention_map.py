"""Attention maps: which prompt positions each layer attended to exactly during an answer, as a picture and a table.

The command `generate --explain` makes them. A second prefill packs the prompt's positions into pages as it packs values; each
decode step then adds the attention weights f32[K, M, p] of the fetched pages to f64[S] per layer.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.bases.retrieval import PagedState
from icejax.cache.pool.page_format import without_codes
from icejax.cache.protocol import CachePolicy, Heads, Outcome
from icejax.cache.sizes import CacheSpec
from icejax.checks.errors import InputError
from icejax.engine.decode.step import DecodeState
from icejax.engine.layers import LayerPlace, run_exact, run_layers
from icejax.engine.plan import Plan, make_plan
from icejax.engine.prefill import padded_prompts, prefill_outcome
from icejax.files import private
from icejax.models.decoder import CausalLM, DecoderLayer
from icejax.models.sharding import check_one_device
from icejax.ops.attention.dense import Attended
from icejax.ops.experts.offloaded_experts import with_experts_on_device
from icejax.text.token_text import token_text

BINS = 480  # columns of the picture


class Explanation:
    """Sums over decode steps the exact attention to each position of one prompt.

    Attributes:
        weights: layer -> f64[S], attention weights summed over decode steps and query heads, without sinks and window.
        steps: number of decode steps so far.
    """

    def __init__(self, model: CausalLM, prompt: Sequence[int], cache: CachePolicy, *, new_tokens: int) -> None:
        """Runs the prompt to find the positions in each page.

        Args:
            prompt: token ids.
            new_tokens: maximum number of answer tokens, as in the generation to explain.

        Raises:
            InputError: the cache keeps all tokens on the device, so there are no fetched pages to explain.
        """
        check_one_device(model.mesh, "--explain")
        plan = make_plan(model, cache, batch_size=1, prompt_tokens=len(prompt), new_tokens=new_tokens)
        if not (plan.pooled and plan.pool.planes):
            raise InputError("--explain shows what is fetched from the host: it needs pages there, as of --cache clustered")
        self._positions = _positions(model, prompt, plan)
        self._prompt = prompt
        self.weights = {layer: np.zeros(len(prompt)) for layer in plan.pooled}
        self.steps, self._renewal = 0, plan.renewal

    def watch(self, state: DecodeState) -> None:
        """Adds one step; pass it to `stream_generate` as `watch`.

        Steps after LongRoPE's factors have changed are left out: the prompt's tokens are in other pages then.
        """
        if self._renewal and int(state.cache.lengths.seen[0]) >= self._renewal:
            return
        self.steps += 1
        for layer, total in self.weights.items():
            paged: PagedState = state.cache.layers[layer]
            pages, weights = np.asarray(paged.ids)[0], np.asarray(paged.weights)[0]
            positions = self._positions[layer].reshape(len(pages), -1, weights.shape[-1])  # [K, P, p], or [K, slots, 1]
            for head in range(len(pages)):
                # Other pages hold generated tokens, or are unknown (-1) since a compaction.
                in_prompt = (pages[head] >= 0) & (pages[head] < positions.shape[1]) & (weights[head] > 0).any(-1)
                page_weights = weights[head][in_prompt]
                np.add.at(total, positions[head, pages[head][in_prompt]][page_weights > 0], page_weights[page_weights > 0])

    def save(self, picture: Path, tokenizer: Any) -> None:
        """Writes the picture, and the same numbers beside it as JSON, for the user alone; each is written whole or not at all.

        Args:
            tokenizer: writes the text of each token of the prompt to the JSON.

        Raises:
            InputError: a file cannot be written.
        """
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
        image = axes.imshow(heat, aspect="auto", interpolation="nearest", cmap="magma", extent=extent, norm=norm)
        axes.set(xlabel="position in the prompt", ylabel="layer", yticks=range(len(layers)), yticklabels=layers)
        axes.set_title(f"attention to tokens from the host, summed over query heads, mean of {self.steps} steps")
        figure.colorbar(image, ax=axes)
        rows = {
            str(layer): {str(i): float(f"{weights[i]:.4g}") for i in np.flatnonzero(weights)}
            for layer, weights in self.weights.items()
        }
        words = [token_text(tokenizer, token)[0] for token in self._prompt]
        text = json.dumps(dict(prompt_tokens=tokens, steps=self.steps, layers=rows, tokens=words))
        parts = {path.with_name(f".{path.name}.part"): path for path in (picture, picture.with_suffix(".json"))}
        try:
            with contextlib.ExitStack() as stack:
                for part in parts:
                    stack.callback(part.unlink, missing_ok=True)
                picture_file, table_file = (stack.enter_context(private.new_file(part)) for part in parts)
                figure.savefig(picture_file, dpi=110, format=picture.suffix[1:])
                table_file.write(text.encode())
                for file in (picture_file, table_file):
                    file.close()  # a full disk is told before a file takes its place
                for part, path in parts.items():
                    os.replace(part, path)
        except OSError as error:
            raise InputError(f"--explain: {picture} cannot be written: {error.strerror}") from None
        finally:
            plt.close(figure)


def check_picture(picture: Path) -> None:
    """Raises InputError if the picture or its table cannot be written; called before anything runs."""
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
            private.new_file(part).close()
            part.unlink()
        except OSError as error:
            raise InputError(f"--explain: {path} cannot be written: {error.strerror}") from None


def _positions(model: CausalLM, prompt: Sequence[int], plan: Plan) -> dict[int, np.ndarray]:
    """Returns, for every layer with pages, the prompt positions i32[K, P, p] of the tokens in its pages."""
    new = jnp.asarray([len(prompt)], jnp.int32)

    def run(layer: DecoderLayer, x: jax.Array, place: LayerPlace):
        policy = plan.policies[place.number] if place.number in plan.pooled else None
        # Positions need a value plane (no `latent`) in fp32, as 16 bits cannot hold them; keys are packed in fp32 anyway.
        spec = replace(plan.spec_of(place.number), latent=False, dtype="float32")
        return _layer(with_experts_on_device(layer), x, new, place.shared, policy=policy, spec=spec)

    positions, embedded = {}, model.model.embed_tokens(jnp.asarray(padded_prompts([prompt], plan.spec)))
    for i, (_, pages) in enumerate(run_layers(model, embedded, run)):
        if pages is not None:
            positions[i] = np.asarray(without_codes(pages))[:, 0, :, 1, :, 0].transpose(1, 0, 2).astype(np.int32)
    return positions


@functools.partial(jax.jit, static_argnames=("policy", "spec"), donate_argnames="x")
def _layer(layer: DecoderLayer, x: jax.Array, new: jax.Array, shared, *, policy: CachePolicy | None, spec: CacheSpec):
    """Runs a layer; with a policy, also packs its keys into pages with positions in place of values."""
    if policy is None:
        return run_exact(layer, x, new)[0], None, shared

    def keep(q: jax.Array, k: jax.Array, v: jax.Array, attended: Attended) -> Outcome:
        positions = jnp.broadcast_to(jnp.arange(k.shape[1], dtype=jnp.float32)[None, :, None, None], v.shape)
        heads = Heads(q.astype(jnp.float32), k.astype(jnp.float32), positions, new, layer.scoring)
        return prefill_outcome(layer, heads, attended, shared, policy=policy, spec=spec)

    x, outcome = run_exact(layer, x, new, keep)
    return x, outcome.pages, outcome.shared or shared
