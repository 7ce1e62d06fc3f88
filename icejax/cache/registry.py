"""Cache policies and presets by their command-line names, and the choice of a policy for each layer of a model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from icejax.cache.policies.adakv import AdaKV
from icejax.cache.policies.arkvale import ArkVale
from icejax.cache.policies.clustered import Clustered
from icejax.cache.policies.clusterkv import ClusterKV
from icejax.cache.policies.coded import Coded
from icejax.cache.policies.expected_attention import ExpectedAttention
from icejax.cache.policies.full import Full, Ring
from icejax.cache.policies.h2o import H2O
from icejax.cache.policies.infinigen import InfiniGen
from icejax.cache.policies.keydiff import KeyDiff
from icejax.cache.policies.kivi import Kivi
from icejax.cache.policies.lacache import LaCache
from icejax.cache.policies.llama_cpp import Q4_0, Q8_0
from icejax.cache.policies.magicpig import MagicPIG
from icejax.cache.policies.omnikv import OmniKV
from icejax.cache.policies.packed import Packed
from icejax.cache.policies.pariskv import ParisKV
from icejax.cache.policies.pqcache import PQCache
from icejax.cache.policies.pyramidkv import PyramidKV
from icejax.cache.policies.quest import Quest
from icejax.cache.policies.restkv import ReSTKV
from icejax.cache.policies.retroinfer import RetroInfer
from icejax.cache.policies.rocketkv import RocketKV
from icejax.cache.policies.shadowkv import ShadowKV
from icejax.cache.policies.snapkv import SnapKV
from icejax.cache.policies.streaming import Streaming
from icejax.cache.policies.tolerant import Tolerant
from icejax.cache.policies.topk import TopK
from icejax.cache.policies.topk_pages import TopKPages
from icejax.cache.policies.topp import TopP
from icejax.cache.policies.tova import TOVA
from icejax.cache.policies.vattention import VAttention
from icejax.cache.protocol import CachePolicy
from icejax.checks.errors import InputError, quoted
from icejax.config import ModelConfig

LOG = logging.getLogger(__name__)

POLICIES: dict[str, type[CachePolicy]] = {
    "adakv": AdaKV,
    "arkvale": ArkVale,
    "clustered": Clustered,
    "clusterkv": ClusterKV,
    "coded": Coded,
    "expected-attention": ExpectedAttention,
    "full": Full,
    "h2o": H2O,
    "infinigen": InfiniGen,
    "keydiff": KeyDiff,
    "kivi": Kivi,
    "lacache": LaCache,
    "magicpig": MagicPIG,
    "omnikv": OmniKV,
    "packed": Packed,
    "pariskv": ParisKV,
    "pqcache": PQCache,
    "pyramidkv": PyramidKV,
    "q4_0": Q4_0,
    "q8_0": Q8_0,
    "quest": Quest,
    "restkv": ReSTKV,
    "retroinfer": RetroInfer,
    "rocketkv": RocketKV,
    "shadowkv": ShadowKV,
    "snapkv": SnapKV,
    "streaming": Streaming,
    "tolerant": Tolerant,
    "topk": TopK,
    "topk-pages": TopKPages,
    "topp": TopP,
    "tova": TOVA,
    "vattention": VAttention,
}
# A preset is a policy with some options set. `icecache` runs IceCache's rules over our pages, not over its M-DCI index.
ICECACHE = dict(rerank=False, tail=False, balance=False, score="mean", group="interleave")
PRESETS: dict[str, tuple[type[CachePolicy], dict[str, Any]]] = {
    "icecache": (Clustered, ICECACHE),
    "icecache-reuse": (Clustered, ICECACHE | dict(reuse=3)),
}
# A choice between caches is one between these: all tokens on the device, or pages in host memory.
ON_DEVICE, IN_PAGES = Full(), Clustered()


def names() -> list[str]:
    """Returns the names of all policies and presets."""
    return [*POLICIES, *PRESETS]


def policy_named(name: str) -> tuple[type[CachePolicy], dict[str, Any]] | None:
    """Returns the policy class and the preset options of `name`; None for an unknown name."""
    return PRESETS.get(name) or ((POLICIES[name], {}) if name in POLICIES else None)


def name_of(policy: CachePolicy) -> str | None:
    """Returns the name of the last preset whose options `policy` has, else its class's name; None for an unregistered class."""
    matching = [name for name, kind in POLICIES.items() if type(policy) is kind]
    for name, (kind, options) in PRESETS.items():  # a preset with more options comes later
        if type(policy) is kind and all(getattr(policy, key) == value for key, value in options.items()):
            matching.append(name)
    return matching[-1] if matching else None


def display_name(policy: CachePolicy) -> str:
    """Returns the registered name of `policy`, else its class name in lower case."""
    return name_of(policy) or type(policy).__name__.lower()


def checked_policy(cache: CachePolicy | None) -> CachePolicy | None:
    """Returns the caller's cache policy; None: one is to be chosen. Raises InputError for any other object."""
    if cache is not None and not isinstance(cache, CachePolicy):
        raise InputError(f"cache must be a policy such as icejax.Clustered(budget=256), got {quoted(cache)}")
    return cache


def layer_policies(policy: CachePolicy, config: ModelConfig, *, capacity: int) -> tuple[CachePolicy, ...]:
    """Returns the policy of every layer: a ring for a sliding-window layer, else the policy's choice for the layer.

    A layer whose window holds all `capacity` tokens counts as full attention, unless its heads differ from the other layers'.
    Of 16 layers with window 512 at every odd index, capacity 4,096 and `dense_layers=None`: layer 0 gets `Full()`, layers 2, 4,
    ..., 14 get `policy.for_layers`, the odd ones `Ring(512)`.
    """
    layers = len(config.windows)
    dense = (2 if layers >= 16 else 0) if policy.dense_layers is None else policy.dense_layers
    same_heads = config.sliding_head_dim is None and config.sliding_key_value_heads is None
    full = [i for i, window in enumerate(config.windows) if window is None or (same_heads and window >= capacity)]
    after_dense = [i for i in full if i >= dense]
    by_layer = dict.fromkeys(full, Full()) | dict(zip(after_dense, policy.for_layers(after_dense, of=layers), strict=True))
    return tuple(by_layer[i] if i in by_layer else Ring(window) for i, window in enumerate(config.windows))


def warn_unused(policy: CachePolicy, by_layer: Sequence[CachePolicy]) -> None:
    """Logs a warning if a caller's policy is that of no layer."""
    if type(policy) is not Full and all(type(layer_policy) in (Full, Ring) for layer_policy in by_layer):
        LOG.warning("every layer has a sliding window or is dense: the %s cache is not used", display_name(policy))
