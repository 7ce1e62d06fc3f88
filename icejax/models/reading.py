"""Reads a Hugging Face config.json: every field is used, known not to change numbers, or an error that names it."""

from __future__ import annotations

import math
from typing import Any

from icejax.config import RopeScaling
from icejax.errors import InputError

# Fields that change no logit of a checkpoint as it is run here.
IRRELEVANT = frozenset(
    """_name_or_path _attn_implementation architectures attention_dropout attn_implementation auto_map bos_token_id
    chunk_size_feed_forward decoder_start_token_id dtype embd_pdrop eos_token_id hidden_dropout id2label initializer_range
    is_decoder is_encoder_decoder keys_to_ignore_at_inference label2id model_type output_attentions
    output_hidden_states pad_token_id pretraining_tp problem_type resid_pdrop return_dict sliding_window
    tokenizer_class torch_dtype transformers_version unsloth_version unsloth_fixed use_cache use_return_dict use_sliding_window
    rope_theta rope_scaling rope_parameters max_sequence_length model_max_length""".split()
)
# Fields that would change numbers, with the only values that do not.
NEUTRAL = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "hidden_act": ("silu",),
    "logits_soft_cap": (None,),
    "partial_rotary_factor": (1.0,),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "quantization_config": (None,),
    "tie_encoder_decoder": (False,),
    "torchscript": (False,),
}
ROPE_FIELDS = {
    "default": {"original_max_position_embeddings"},
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    },
}  # fmt: skip


class Fields:
    """The fields of a config.json, each taken at most by name; `finish` refuses what nobody took."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw, self._taken = raw, set()

    def take(self, name: str, kind: type, *, default: Any = ...) -> Any:
        """Returns the field `name`; `default` where it is missing or null.

        Raises:
            InputError: it is missing without a default, or not of `kind`.
        """
        self._taken.add(name)
        value = self._raw.get(name)
        if value is None:
            if default is ...:
                raise InputError(f"config.json has no {name!r}, which a {self._raw.get('model_type')} model needs")
            return default
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InputError(f"config.json: {name!r} must be {kind.__name__}, found {value!r}")
        return value

    def finish(self) -> None:
        """Raises InputError for every field that may change numbers and was not taken."""
        for name, value in self._raw.items():
            if name in NEUTRAL:
                if value is not None and value not in NEUTRAL[name]:
                    raise InputError(f"config.json: {name}={value!r} is not supported (only {NEUTRAL[name][0]!r})")
            elif name not in self._taken and name not in IRRELEVANT and value is not None:
                raise InputError(
                    f"config.json: field {name!r} ({value!r}) is not known here and may change the model's numbers"
                )


def common(raw: dict[str, Any]) -> tuple[Fields, dict[str, Any]]:
    """Returns the reader and the ModelConfig fields that all families read alike.

    Reads both the form of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and of 5 (`rope_parameters`, `dtype`).
    """
    fields = Fields(raw)
    for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"):
        if fields.take(name, int) < 1:
            raise InputError(f"config.json: {name!r} must be at least 1, found {raw[name]}")
    hidden, heads = fields.take("hidden_size", int), fields.take("num_attention_heads", int)
    layers = fields.take("num_hidden_layers", int)
    context = fields.take("max_position_embeddings", int, default=2048)
    theta, scaling = rope(raw, max_position_embeddings=context)
    found = dict(
        model_type=raw["model_type"],
        vocab_size=fields.take("vocab_size", int),
        hidden_size=hidden,
        intermediate_size=fields.take("intermediate_size", int),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=fields.take("num_key_value_heads", int, default=heads),
        head_dim=fields.take("head_dim", int, default=hidden // heads),
        rms_norm_eps=fields.take("rms_norm_eps", float, default=1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=context,
        tie_word_embeddings=fields.take("tie_word_embeddings", bool, default=False),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=token_ids(raw.get("eos_token_id")),
    )
    if heads % found["num_key_value_heads"]:
        raise InputError(f"config.json: {heads} attention heads do not divide among {found['num_key_value_heads']} KV heads")
    return fields, found


def number(value: Any) -> float:
    """Returns a number of rope_scaling; InputError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"config.json: expected a number in the rope fields, found {value!r}")
    return float(value)


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Returns an eos field as a tuple."""
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)


def layer_types(raw: dict[str, Any], fields: Fields, *, window: int | None, first_sliding: int) -> dict[str, Any]:
    """Returns `layer_types` and `sliding_window`: as listed, else sliding from layer `first_sliding` on, if windowed."""
    count = raw["num_hidden_layers"]
    listed = fields.take("layer_types", list, default=None)
    if listed is None:
        listed = ["sliding_attention" if window is not None and i >= first_sliding else "full_attention" for i in range(count)]
    unknown = sorted(set(listed) - {"full_attention", "sliding_attention"})
    if unknown or len(listed) != count:
        raise InputError(
            f"config.json: layer_types must name full_attention or sliding_attention for {count} layers, found {listed}"
        )
    sliding = "sliding_attention" in listed
    if sliding and window is None:
        raise InputError("config.json: layer_types has sliding layers and no sliding_window is in use")
    return dict(layer_types=tuple(listed), sliding_window=window if sliding else None)


def rope(raw: dict[str, Any], *, max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    """Returns theta and the scaling of either form of the config.

    Raises:
        InputError: the rope type or one of its fields is not supported.
    """
    # Where both are given transformers takes rope_scaling, which is how a reader stretches a published config.
    found = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise InputError(f"config.json: rope_scaling or rope_parameters must be an object, found {found!r}")
    found = {name: value for name, value in found.items() if value is not None}
    theta = number(
        found.pop("rope_theta", None) or raw.get("rope_theta") or (raw.get("rope_parameters") or {}).get("rope_theta") or 1e4
    )
    old_name, kind = found.pop("type", None), found.pop("rope_type", None)
    kind = kind or old_name or "default"
    if found.pop("partial_rotary_factor", 1.0) != 1.0:
        raise InputError("config.json: partial_rotary_factor other than 1.0 is not supported")
    if kind not in ROPE_FIELDS:
        raise InputError(f"config.json: rope type {kind!r} is not supported ({', '.join(ROPE_FIELDS)} are)")
    unknown = sorted(name for name in found if name not in ROPE_FIELDS[kind])
    if unknown:
        raise InputError(
            f"config.json: fields {unknown} of rope type {kind!r} are not known here and may change the model's numbers"
        )
    if kind == "default":
        return theta, None
    given = {name: value if name == "truncate" else number(value) for name, value in found.items()}
    original = given.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
    original = int(original or max_position_embeddings)
    needed = {"llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ()}.get(kind, ("factor",))
    for name in needed:
        if name not in given:
            raise InputError(f"config.json: rope type {kind!r} needs {name!r}")
    if kind == "dynamic":
        original = max_position_embeddings  # transformers stretches from here whatever else is written
    factor = float(given.get("factor") or max_position_embeddings / original)
    if kind != "yarn":
        band = {name: float(given[name]) for name in ("low_freq_factor", "high_freq_factor") if name in given}
        return theta, RopeScaling(rope_type=kind, factor=factor, original_max_position_embeddings=original, **band)
    return theta, RopeScaling(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=_yarn_attention(given, factor),
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        truncate=given.get("truncate", True),
    )


def _yarn_attention(given: dict[str, Any], factor: float) -> float:
    """The paper's temperature, or the ratio of the two scales that DeepSeek's configs give."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return scale(given["mscale"]) / scale(given["mscale_all_dim"])
    return scale(1.0)
