"""Prints the prompt positions that kvpress keeps, as JSON by method, layer and KV head: kvpress_kept.py MODEL TOKENS BUDGET.

Runs in kvpress's own environment, without icejax. TOKENS is a JSON file of token ids.
"""

import contextlib
import json
import sys

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache

WINDOW = 16


def presses(ratio: float) -> dict[str, tuple[str, kvpress.BasePress]]:
    """Returns, by method, the attention implementation that its press needs, and the press."""
    snapkv = dict(window_size=WINDOW, kernel_size=5)
    return {
        "streaming": ("sdpa", kvpress.StreamingLLMPress(ratio, n_sink=4)),
        "snapkv": ("sdpa", kvpress.SnapKVPress(ratio, **snapkv)),
        "tova": ("sdpa", kvpress.TOVAPress(ratio)),
        "pyramidkv": ("sdpa", kvpress.PyramidKVPress(ratio, **snapkv, beta=3)),
        "adakv": ("sdpa", kvpress.AdaKVPress(kvpress.SnapKVPress(ratio, **snapkv), alpha_safeguard=0)),
        "keydiff": ("sdpa", kvpress.KeyDiffPress(ratio)),
        "expected-attention": ("sdpa", kvpress.ExpectedAttentionPress(ratio, epsilon=0.01)),
        "observed": ("eager", kvpress.ObservedAttentionPress(ratio)),
    }


@torch.no_grad()
def keys(model, tokens: list[int], press: kvpress.BasePress | None = None) -> list[torch.Tensor]:
    """Returns each layer's keys [K, S, H] in the cache after the prompt."""
    cache = DynamicCache()
    with contextlib.nullcontext() if press is None else press(model):
        model(torch.tensor([tokens]), past_key_values=cache)
    return [layer.keys[0] for layer in cache.layers]


def main(folder: str, file: str, budget: str) -> None:
    tokens = json.loads(open(file).read())
    models = {name: AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name) for name in ("sdpa", "eager")}
    positions_by_method = {}
    for name, (attention, press) in presses(1 - (int(budget) + 0.5) / len(tokens)).items():
        model, positions_by_layer = models[attention], []
        full_keys = keys(model, tokens)
        for layer, (kept_keys, all_keys) in enumerate(zip(keys(model, tokens, press), full_keys, strict=True)):
            kept_mask = (kept_keys[:, :, None] == all_keys[:, None]).all(-1).any(1)  # kept keys are bit-equal copies
            if name == "adakv":  # keeps every key, and masks some
                _, heads, masked = model.model.layers[layer].self_attn.masked_key_indices
                kept_mask[heads, masked] = False
            positions_by_layer.append([head_mask.nonzero()[:, 0].tolist() for head_mask in kept_mask])
        positions_by_method[name] = positions_by_layer
    print(json.dumps(positions_by_method))


if __name__ == "__main__":
    main(*sys.argv[1:])
