"""Attention maps: which prompt positions each layer attended to exactly during an answer, as a picture and a table.

The command `generate --explain` makes them. A second prefill finds the positions of the tokens in each page.
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

from icejax.cache.protocol import CachePolicy, Heads, Outcome, Shared
from icejax.cache.shares import ORDER, PAGES
from icejax.cache.sizes import CacheSpec
from icejax.checks.errors import InputError
from icejax.engine.decode.attention_map import AttentionMap, check_has_pages, positions_in
from icejax.engine.layers import LayerPlace, embed, run_exact, run_layers
from icejax.engine.plan import Plan, make_plan
from icejax.engine.prefill import padded_prompts, prefill_outcome
from icejax.files import private
from icejax.models.decoder import CausalLM, DecoderLayer
from icejax.models.sharding import module_cuts
from icejax.ops.attention.dense import Attended
from icejax.ops.experts.offloaded_experts import with_experts_on_device
from icejax.runtime.mesh import WHOLE, on_mesh, stream_cut
from icejax.text.token_text import token_text


class Explanation(AttentionMap):
    """The attention map of an answer of `generate`."""

    def __init__(self, model: CausalLM, prompt: Sequence[int], cache: CachePolicy, *, new_tokens: int) -> None:
        """Runs the prompt to find the positions in each page.

        Args:
            prompt: token ids.
            new_tokens: maximum number of answer tokens, as in the generation to explain.

        Raises:
            InputError: the cache keeps all tokens on the device, so there are no fetched pages to explain.
        """
        plan = make_plan(model, cache, batch_size=1, prompt_tokens=len(prompt), new_tokens=new_tokens)
        check_has_pages(plan)
        super().__init__(_positions(model, prompt, plan), len(prompt), renewal=plan.renewal)
        self._prompt = prompt

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

        layers, tokens, _, heat = self.picture()
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

    positions, embedded = {}, embed(model, jnp.asarray(padded_prompts([prompt], plan.spec)))
    for i, (_, outcome) in enumerate(run_layers(model, embedded, run)):
        if outcome.pages is not None:
            positions[i] = positions_in(outcome)
    return positions


@functools.partial(jax.jit, static_argnames=("policy", "spec"), donate_argnames="x")
def _layer(layer: DecoderLayer, x: jax.Array, new: jax.Array, shared, *, policy: CachePolicy | None, spec: CacheSpec):
    """Runs a layer; with a policy, also packs its keys into pages with positions in place of values."""

    def run(layer: DecoderLayer, x: jax.Array, new: jax.Array, shared: Shared | None):
        def keep(q: jax.Array, k: jax.Array, v: jax.Array, attended: Attended) -> Outcome:
            positions = jnp.broadcast_to(jnp.arange(k.shape[1], dtype=jnp.float32)[None, :, None, None], v.shape)
            heads = Heads(q.astype(jnp.float32), k.astype(jnp.float32), positions, new, layer.scoring)
            return prefill_outcome(layer, heads, attended, shared, policy=policy, spec=spec)

        if policy is None:
            return run_exact(layer, x, new)[0], Outcome(None), shared
        x, outcome = run_exact(layer, x, new, keep)
        return x, Outcome(None, pages=outcome.pages), outcome.shared or shared

    stream = stream_cut(layer.mesh)
    arrays, cuts = (layer, x, new, shared), (module_cuts(layer), stream, WHOLE, ORDER)
    return on_mesh(layer.mesh, run, arrays, cuts, (stream, Outcome(None, pages=PAGES), ORDER))
