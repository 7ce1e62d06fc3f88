"""Prints which tokens kvpress keeps of a prompt, as JSON; its environment has no icejax: kvpress_kept.py MODEL TOKENS BUDGET."""

import contextlib
import json
import sys

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache

WINDOW = 16


def presses(ratio: float) -> dict[str, tuple[str, kvpress.BasePress]]:
    """Returns every method with the attention that its press needs."""
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
    """Returns the keys [K, S, H] that every layer has of a prompt."""
    cache = DynamicCache()
    with contextlib.nullcontext() if press is None else press(model):
        model(torch.tensor([tokens]), past_key_values=cache)
    return [layer.keys[0] for layer in cache.layers]


def main(folder: str, file: str, budget: str) -> None:
    tokens = json.loads(open(file).read())
    models = {name: AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name) for name in ("sdpa", "eager")}
    found = {}
    for name, (attention, press) in presses(1 - (int(budget) + 0.5) / len(tokens)).items():
        model, of_layers = models[attention], []
        every = keys(model, tokens)
        for layer, (kept, all_keys) in enumerate(zip(keys(model, tokens, press), every, strict=True)):
            there = (kept[:, :, None] == all_keys[:, None]).all(-1).any(1)  # a kept key is one of all, to the last bit
            if name == "adakv":  # keeps every key, and says which of them are masked
                _, heads, positions = model.model.layers[layer].self_attn.masked_key_indices
                there[heads, positions] = False
            of_layers.append([each.nonzero()[:, 0].tolist() for each in there])
        found[name] = of_layers
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
