"""Fingerprint of a saved cache: the model, cache options, tokenizer and chat template that it was saved with.

`Session.save` writes it, and `storage.open_session` compares it with the fingerprint of the model and tokenizer at hand.
`serving.prefix_folder` names a folder by it.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from icejax.cache.protocol import CachePolicy
from icejax.cache.registry import name_of, policy_named
from icejax.checks.errors import InputError, quoted
from icejax.config import ModelConfig
from icejax.models.decoder import CausalLM
from icejax.models.sharding import weights_of
from icejax.runtime import devices, processes
from icejax.text.tokenizer_errors import tokenizer_error_from

PIECE = 1024  # values of every weight that the checksum covers
TOKENIZER, TEMPLATE, FACTORS = "tokenizer", "chat template", "LongRoPE's factors"
PROBES = (  # texts on which tokenizers differ: spaces, digits, code and other scripts
    "Hello world",
    " leading and  double spaces\n\n\ttabs",
    "def f(x_1: int) -> float:\n    return x_1 ** 2.50  # 1234567",
    "Größe, naïve café, 你好, мир, \N{WAVING HAND SIGN}",
)
INERT = {"config.eos_token_ids"}  # it ends answers and changes no number in a cache
SCALARS = {int, float, str, bool, type(None)}


def fingerprint(model: CausalLM, policy: CachePolicy, tokenizer: Any) -> dict[str, Any]:
    """Returns the fields that must be equal for a saved cache to be continued.

    They are the model's config and a checksum of its weights without experts, the cache's options, and checksums of the token
    ids of some texts and of the chat template.
    """
    config = dict(_flat("config", dataclasses.asdict(model.config)))
    policy = policy.for_platform(devices.platform(), latent=model.config.latent is not None)
    options = {f"cache.{key}": value for key, value in dataclasses.asdict(policy).items()}
    weights = 0
    for key, leaf in weights_of(model, model.mesh):  # a piece of each weight tells checkpoints apart
        if ".experts." in key:
            continue  # experts may be in host memory in one run and on the device in another
        while leaf.ndim > 1 and leaf[0].size >= PIECE:  # indexing first, or the whole weight would be copied
            leaf = leaf[0]
        weights = zlib.crc32(processes.whole(leaf[:PIECE].reshape(-1)[:PIECE]).tobytes(), weights)
    fields = config | {"dtype": model.dtype, "weights": weights, "cache.name": name_of(policy)} | options
    if model.config.short_context is not None:
        fields = {FACTORS: "by the text's length"} | fields
    fields |= {TOKENIZER: _tokenizer_sum(tokenizer), TEMPLATE: _template_sum(tokenizer)}
    return json.loads(json.dumps(fields, default=str))  # through JSON, to compare equal with a fingerprint read from disk


def weights_sum(model: CausalLM) -> int:
    """Returns a checksum of every value of the weights, for a cache that is used without a question.

    Of experts in host memory, only the parts that are always on the device count.
    """
    offloads, total = any(layer.offloaded is not None for layer in model.model.layers), 0
    for key, leaf in weights_of(model, model.mesh):
        if not (offloads and ".experts." in key):
            total = zlib.crc32(processes.whole(_bit_sum(leaf)).tobytes(), total)
    return total


@jax.jit
def _bit_sum(x: jax.Array) -> jax.Array:
    """Returns the u32 sum of an array's bits, each value times its own odd number: a change of one value changes the sum."""
    is_whole = jnp.issubdtype(x.dtype, jnp.integer)
    bits = x if is_whole else jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    bits = bits.reshape(-1).astype(jnp.uint32)
    return (bits * (jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(2654435762) + 1)).sum(dtype=jnp.uint32)


def check_registered(policy: CachePolicy) -> None:
    """Raises InputError for a policy that has no name, by which a saved cache would find it."""
    if name_of(policy) is None:
        raise InputError(f"a {type(policy).__name__} cache cannot be saved: register it in icejax.POLICIES")


def _tokenizer_sum(tokenizer: Any) -> int:
    """Returns a checksum of the token ids of `PROBES`; library versions may serialise the same tokenizer differently."""
    with tokenizer_error_from("the tokenizer fails"):
        ids = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in PROBES]
    return zlib.crc32(json.dumps(ids).encode())


def _template_sum(tokenizer: Any) -> int | None:
    """Returns a checksum of the chat template; None without one."""
    template = getattr(tokenizer, "chat_template", None)  # not all tokenizers have the attribute
    return None if template is None else zlib.crc32(json.dumps(template, sort_keys=True).encode())


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the values of nested dicts by dotted name, so that a message can name one: `config.latent.kv_lora_rank`."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{name}.{key}", item)
    else:
        yield name, value


def check_same(path: Path, saved: dict[str, Any], here: dict[str, Any], policy: CachePolicy, *, chat: bool) -> None:
    """Compares the fingerprint `saved` of the session at `path` with the current one, `here`.

    A config field or cache option that did not exist when the session was saved must have its default now.

    Args:
        policy: the current cache policy.
        chat: whether the session holds a chat; only then are chat templates compared.

    Raises:
        InputError: the fingerprints differ; the message names a difference.
    """
    defaults = _defaults("config.", ModelConfig) | _defaults("cache.", type(policy))
    for key in here | saved:
        value = saved.get(key, defaults.get(key))
        if key in INERT or value == here.get(key) or (key == TEMPLATE and not chat):
            continue
        if key == FACTORS:
            raise InputError(
                f"{path} was saved by an older icejax, which had one set of LongRoPE's factors for all texts: "
                "begin a new session in another folder, or remove it"
            )
        if key in (TOKENIZER, TEMPLATE):
            raise InputError(f"{path} was saved with another {key}: use the same, or another folder")
        difference = f"{path} was saved with {key} = {_shown(value)}, here it is {_shown(here.get(key))}"
        raise InputError(f"{difference}: use the same, or another folder")


def _defaults(prefix: str, kind: type) -> dict[str, Any]:
    """Returns the defaults of a dataclass's fields in a fingerprint's form, each name after `prefix`."""
    fields = [field for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING]
    return json.loads(json.dumps({prefix + field.name: field.default for field in fields}, default=str))


def policy_of(path: Path, saved: dict[str, Any]) -> CachePolicy:
    """Returns the cache policy of the fingerprint `saved`, read from `path`.

    Raises:
        InputError: no policy has that name, or the policy does not have those options.
    """
    options = {key.removeprefix("cache."): value for key, value in saved.items() if key.startswith("cache.")}
    name = options.pop("name", None)
    entry = policy_named(name) if isinstance(name, str) else None
    if entry is None:
        raise InputError(
            f"{path} was saved with cache.name = {_shown(name)}: register it in icejax.POLICIES, or use another folder"
        )
    kind, _ = entry
    kinds = typing.get_type_hints(kind)
    for key, value in options.items():
        if key not in {field.name for field in dataclasses.fields(kind)}:
            raise InputError(
                f"{path} was saved with cache.{key} = {_shown(value)}, an option that this version does not have: "
                "use the version that saved it, or another folder"
            )
        if not _fits(value, kinds[key]):
            damaged(path, f"cache.{key} is {_shown(value)}")
    try:
        policy = kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})
        hash(policy)  # jit takes the policy as a static argument
        return policy
    except (TypeError, ValueError) as error:
        damaged(path, f"its cache: {error}")


def _fits(value: Any, kind: Any) -> bool:
    """Says whether a value read from JSON fits the annotation `kind`; any value fits a kind that is not in `SCALARS`."""
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    kinds = set(typing.get_args(kind)) if isinstance(kind, types.UnionType) else {kind}
    return not kinds <= SCALARS or type(value) in kinds or (type(value) is int and float in kinds)


def _shown(value: Any) -> str:
    return " ".join((value if isinstance(value, str) else quoted(value)).split())[:80]


class Damaged(InputError):
    """Raised for a session whose files are not as they were saved.

    Attributes:
        fault: the damage, in one line.
    """

    def __init__(self, message: str, *, fault: str = "") -> None:  # pickle needs a default
        super().__init__(message)
        self.fault = fault


def damaged(path: Path, fault: str) -> NoReturn:
    """Raises `Damaged` for the session at `path`."""
    fault = " ".join(fault.split())
    raise Damaged(f"{path} is a damaged session ({fault}): use a copy of it, or start over in another folder", fault=fault)
