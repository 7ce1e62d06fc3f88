"""Reads the RoPE of a config.json, in the formats of transformers 4 and 5; `hf_config` calls it for all families."""

from __future__ import annotations

import logging
import math
from typing import Any

from icejax.checks import numbers
from icejax.checks.errors import InputError, quoted
from icejax.config import RopeScaling
from icejax.models.hf.fields import Fields

ROPE_FIELDS = {
    "default": {"original_max_position_embeddings"},
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate", "finetuned",
    },
    "proportional": {"factor", "partial_rotary_factor"},
    "longrope": {"factor", "original_max_position_embeddings", "short_factor", "long_factor", "attention_factor"},
}  # fmt: skip
LOG = logging.getLogger(__name__)
THETA = dict(least=2, most=1e20)  # yarn divides by log(theta)
PART = dict(least=0, most=1, above=True)
SCALE = dict(least=1e-6, most=1e6)


def by_type(raw: dict[str, Any], *, full: float, sliding: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns two copies of a raw config, with the rope fields of the full-attention layers and of the sliding layers.

    transformers 5 writes `rope_parameters` by layer type. In the older format all rope fields are those of full attention;
    sliding layers have only a theta.

    Args:
        full, sliding: theta of either layer type where `rope_parameters` has none.

    Raises:
        InputError: `rope_parameters` is not by layer type, or has `truncate` false.
    """
    ropes, types = raw.get("rope_parameters") or {}, ("full_attention", "sliding_attention")
    if not isinstance(ropes, dict) or not all(k in types and isinstance(v, dict | None) for k, v in ropes.items()):
        raise InputError(f"config.json: 'rope_parameters' must be an object of {' and '.join(types)}, got {quoted(ropes)}")
    if any(isinstance(x, dict) and x.get("truncate") is False for x in (*ropes.values(), raw.get("rope_scaling"))):
        raise InputError("config.json: a rope with truncate=False is not supported where it differs by layer type (only True)")
    forms = ({"rope_theta": theta} | (ropes.get(name) or {}) for name, theta in zip(types, (full, sliding), strict=True))
    outer = dict(rope_theta=None, original_max_position_embeddings=None)  # neither layer type reads the outer fields
    full_raw, sliding_raw = (raw | outer | {"rope_parameters": form} for form in forms)
    return full_raw, sliding_raw | {"rope_scaling": None}


def rope(
    fields: Fields, *, max_position_embeddings: int, part: float | None = None, yarn_fields: frozenset[str] = frozenset()
) -> tuple[float, float, RopeScaling | None]:
    """Returns the rotated part of a head (0 to 1), theta and the scaling.

    Args:
        part: the rotated part where the config does not say; None: the family rotates whole heads.
        yarn_fields: fields of the family's `yarn` beyond the common ones.

    Raises:
        InputError: the rope type or one of its fields is not supported or out of range.
    """
    form, theta = _form_and_theta(fields)
    kinds = [form.take(key, str, default=None) for key in ("rope_type", "type")]
    kind = kinds[0] or kinds[1] or "default"
    part = _rotated_part(fields, form, kind, part)
    _check_fields(form, kind, yarn_fields)
    # As in transformers, the outer field takes precedence.
    original = form.whole("original_max_position_embeddings", default=max_position_embeddings)
    original = fields.whole("original_max_position_embeddings", default=original)
    if kind == "default":
        return part, theta, None
    if kind in ("linear", "dynamic"):
        original = max_position_embeddings  # transformers scales from here and ignores other fields
    factor = _factor(form, kind, max_position_embeddings / original)
    if kind in ("linear", "dynamic", "yarn") and original * factor > numbers.LARGEST:
        raise InputError(f"{form.source}: a context of {original} x {factor:g} tokens is too long to count")
    options = OPTIONS[kind](form, factor, original) if kind in OPTIONS else {}
    return part, theta, RopeScaling(rope_type=kind, factor=factor, original_max_position_embeddings=original, **options)


def _form_and_theta(fields: Fields) -> tuple[Fields, float]:
    """Returns the fields that describe the rope, and theta."""
    forms = {name: fields.take(name, dict, default={}) for name in ("rope_scaling", "rope_parameters")}
    # With both, transformers reads rope_scaling, which users add to a published config to extend its context.
    name = "rope_scaling" if forms["rope_scaling"] else "rope_parameters"
    form = Fields(forms[name], f"{fields.source}, {name}")
    sources = (form, fields, Fields(forms["rope_parameters"], f"{fields.source}, rope_parameters"))
    thetas = [source.number("rope_theta", **THETA, default=None) for source in sources]
    if name == "rope_scaling" and thetas[:2] == [None, None] and thetas[2] is not None and "rope_theta" not in fields.raw:
        LOG.warning(
            "config.json: rope_theta comes from rope_parameters; with rope_scaling, transformers would use its default theta"
        )
    return form, next((value for value in thetas if value is not None), 1e4)


def _rotated_part(fields: Fields, form: Fields, kind: str, part: float | None) -> float:
    """Returns the rotated part of a head; `part` is that of the family, None: the family rotates whole heads."""
    if part is not None:
        part = fields.number("partial_rotary_factor", **PART, default=part)
        return form.number("partial_rotary_factor", **PART, default=part)
    if kind != "proportional" and form.take("partial_rotary_factor", object, default=1.0) != 1.0:
        raise InputError(f"{form.source}: partial_rotary_factor other than 1.0 is not supported")
    return 1.0


def _check_fields(form: Fields, kind: str, yarn_fields: frozenset[str]) -> None:
    """Logs the fields that the rope type does not use; InputError for an unknown type, or ropes within the rope."""
    if kind not in ROPE_FIELDS:
        raise InputError(f"{form.source}: rope type {quoted(kind)} is not supported ({', '.join(ROPE_FIELDS)} are)")
    known = form.taken | ROPE_FIELDS[kind] | (yarn_fields if kind == "yarn" else set())
    ignored = {key: value for key, value in form.raw.items() if value is not None and key not in known}
    if nested := sorted(key for key, value in ignored.items() if isinstance(value, dict)):
        raise InputError(f"{form.source}: {quoted(nested)} is not supported: this family has one rope for all layers")
    if ignored:
        LOG.warning("%s: rope type %r does not use %s, as in transformers", form.source, kind, ", ".join(map(quoted, ignored)))


def _factor(form: Fields, kind: str, context_ratio: float) -> float:
    """Returns the factor of the context; `context_ratio` is the context over the original one."""
    factor = form.number("factor", least=1, most=1e6, default=None)
    if factor is not None:
        return factor
    if kind == "proportional":
        return 1.0
    if kind not in ("yarn", "longrope"):
        raise InputError(f"{form.source}: rope type {kind!r} needs 'factor'")
    return numbers.number(f"{form.source}: the factor", context_ratio, least=1, most=1e6)


def _llama3(form: Fields, factor: float, original: int) -> dict[str, Any]:
    options = {key: form.number(key, **SCALE) for key in ("low_freq_factor", "high_freq_factor")}
    if options["low_freq_factor"] >= options["high_freq_factor"]:
        raise InputError(f"{form.source}: 'low_freq_factor' must be below 'high_freq_factor', got {quoted(options)}")
    return options


def _yarn(form: Fields, factor: float, original: int) -> dict[str, Any]:
    attention_factor, score_factor = _yarn_factors(form, factor)
    return dict(
        attention_factor=attention_factor,
        beta_fast=form.number("beta_fast", **SCALE, default=32.0),
        beta_slow=form.number("beta_slow", **SCALE, default=1.0),
        truncate=form.take("truncate", bool, default=True),
        query_beta=form.number("llama_4_scaling_beta", least=0, most=1e6, default=0.0),
        score_factor=score_factor,
    )


def _proportional(form: Fields, factor: float, original: int) -> dict[str, Any]:
    return dict(part=form.number("partial_rotary_factor", **PART, default=1.0))


def _longrope(form: Fields, factor: float, original: int) -> dict[str, Any]:
    numbers.integer(f"{form.source}: 'original_max_position_embeddings' of longrope", original, least=2)
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return dict(
        attention_factor=form.number("attention_factor", **SCALE, default=attention_factor),
        factors=_factors(form, "long_factor"),
        short_factors=_factors(form, "short_factor"),
    )


# Readers of the fields that only one rope type has; each takes the fields, the factor and the original context.
OPTIONS = {"llama3": _llama3, "yarn": _yarn, "proportional": _proportional, "longrope": _longrope}


def _factors(form: Fields, name: str) -> tuple[float, ...]:
    return tuple(numbers.number(f"{form.source}: {name!r}", factor, **SCALE) for factor in form.take(name, list))


def _yarn_factors(form: Fields, factor: float) -> tuple[float, float]:
    """Returns YaRN's factors of cos and sin, and of the scores in latent attention.

    With s(m) = 0.1 m ln(factor) + 1, the first is `attention_factor` if the config has one, s(mscale) / s(mscale_all_dim) if it
    has both (DeepSeek), else s(1), the paper's temperature. The second is s(mscale_all_dim)^2.

    Example: factor 40 and mscale = mscale_all_dim = 1 give 1 and 1.369^2 = 1.874.
    """
    weights = [form.number(key, least=0, most=1e6, default=0.0) for key in ("mscale", "mscale_all_dim")]
    attention_factor = form.number("attention_factor", **SCALE, default=None)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    default = scale(weights[0]) / scale(weights[1]) if all(weights) else scale(1.0)
    return default if attention_factor is None else attention_factor, scale(weights[1]) ** 2
