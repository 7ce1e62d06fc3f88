"""Bits per byte of the bundled model and of a 3-gram, on held-out text: ``python -m bench.needle.language``.

The output is one JSON line per kind of text. The model runs in fp32 on pieces of `--length` bytes, whose first 64 bytes are not
counted. The 3-gram of bytes has Witten-Bell smoothing (Bell, Cleary and Witten 1990) and is trained on all training text.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from bench import panel
from bench.needle import task
from icejax.api.generate import ASSETS
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer
from icejax.engine.layers import run_exact, run_layers
from icejax.models.decoder import CausalLM
from icejax.runtime import devices

UNCOUNTED = 64  # first bytes of a piece, which have little context


class Trigram:
    """A 3-gram of bytes with Witten-Bell smoothing.

    P(c | a b) = (n(abc) + t(ab) P(c | b)) / (n(ab) + t(ab)), where n counts occurrences and t(ab) the different bytes after ab.
    P(c | b) and P(c) are smoothed in the same way, and the last fallback is 1 / 128.
    """

    def __init__(self, text: bytes) -> None:
        data = np.frombuffer(text, np.uint8).astype(np.int64)
        self._probabilities = np.full(128, 1 / 128)
        for order in range(3):
            index = sum(data[i : len(data) - order + i] * 128 ** (order - i) for i in range(order + 1))
            counts = np.bincount(index, minlength=128 ** (order + 1)).reshape(-1, 128).astype(np.float32)
            kinds, total = (counts > 0).sum(-1, keepdims=True), counts.sum(-1, keepdims=True)
            lower = np.tile(self._probabilities.reshape(-1, 128), (len(counts) * 128 // self._probabilities.size, 1))
            self._probabilities = (counts + np.maximum(kinds, 1) * lower) / (total + np.maximum(kinds, 1))

    def bits(self, text: bytes) -> np.ndarray:
        """Returns the bits of every byte from the third on, f64[bytes - 2]."""
        data = np.frombuffer(text, np.uint8).astype(np.int64)
        return -np.log2(self._probabilities[data[:-2] * 128 + data[1:-1], data[2:]])


@jax.jit
def _bits(model: CausalLM, tokens: jax.Array) -> jax.Array:
    """Returns the bits [B, T - 1] of tokens [B, T], without the first token."""
    lengths = jnp.full(len(tokens), tokens.shape[1])
    *_, (x, _) = run_layers(model, model.model.embed_tokens(tokens), lambda layer, x, _: (*run_exact(layer, x, lengths), None))
    log_probabilities = jax.nn.log_softmax(model.logits(x)[:, :-1])
    return -jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1)[..., 0] / jnp.log(2.0)


def pieces(length: int, count: int) -> Iterator[tuple[str, list[bytes]]]:
    """Yields each kind of held-out text with `count` pieces of `length` bytes; every call draws the same pieces."""
    rng = np.random.default_rng(0)
    for kind in task.KINDS:
        text = task.corpus("heldout", kind)
        starts = rng.integers(0, len(text) - length, size=count)
        yield kind, [text[start : start + length] for start in starts]


def bits(model: CausalLM, texts: list[bytes]) -> np.ndarray:
    """Returns the bits of the counted bytes of texts of one length, f32[texts, bytes - UNCOUNTED]."""
    tokens = np.asarray([list(text) for text in texts], np.int32)
    batches = np.split(tokens, range(8, len(tokens), 8))
    return np.concatenate([np.asarray(_bits(model, batch))[:, UNCOUNTED - 1 :] for batch in batches])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.needle.language", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ASSETS, help="checkpoint folder of byte tokens (default: the bundled one)")
    parser.add_argument("--length", type=int, default=1024, help="bytes of a piece (default: %(default)s)")
    parser.add_argument("--pieces", type=int, default=64, help="of each kind of text (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        pieces_by_kind = pieces(
            integer("--length", arguments.length, least=UNCOUNTED + 1, most=2**16), integer("--pieces", arguments.pieces)
        )
        model = panel.load(arguments.model, dtype="float32")
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    trigram = Trigram(b"\n".join(task.corpus("train", kind) for kind in task.KINDS))
    for kind, texts in pieces_by_kind:
        model_bits, trigram_bits = bits(model, texts), np.stack([trigram.bits(text)[UNCOUNTED - 2 :] for text in texts])
        row = dict(
            kind=kind,
            bytes=model_bits.size,
            bits_per_byte=round(float(model_bits.mean()), 4),
            trigram=round(float(trigram_bits.mean()), 4),
        )
        print(json.dumps(row | dict(device=devices.device().device_kind, jax=jax.__version__)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
