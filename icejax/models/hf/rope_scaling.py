"""How a config.json says which rotary embedding a model has, in the forms of transformers 4 and 5."""

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
        "mscale_all_dim", "truncate", "attn_factor", "finetuned",
    },
    "proportional": {"factor", "partial_rotary_factor"},
    "longrope": {"factor", "original_max_position_embeddings", "short_factor", "long_factor", "attention_factor"},
}  # fmt: skip
LOG = logging.getLogger(__name__)
THETA = dict(least=2, most=1e20)  # yarn divides by its logarithm
PART = dict(least=0, most=1, above=True)
SCALE = dict(least=1e-6, most=1e6)


def by_type(raw: dict[str, Any], *, full: float, sliding: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a raw config twice, as layers of full attention read its rope fields, and sliding ones.

    transformers 5 has a `rope_parameters` of each. Before, all fields but the sliding layers' theta were of full attention.

    Args:
        full, sliding: theta of each where `rope_parameters` does not say.

    Raises:
        InputError: `rope_parameters` is not by layer type.
    """
    given, kinds = raw.get("rope_parameters") or {}, ("full_attention", "sliding_attention")
    if not isinstance(given, dict) or not all(k in kinds and isinstance(v, dict | None) for k, v in given.items()):
        raise InputError(f"config.json: 'rope_parameters' must be an object of {' and '.join(kinds)}, got {quoted(given)}")
    if any(isinstance(x, dict) and x.get("truncate") is False for x in (*given.values(), raw.get("rope_scaling"))):
        raise InputError("config.json: a rope with truncate=False is not supported where it differs by layer type (only True)")
    forms = ({"rope_theta": theta} | (given.get(kind) or {}) for kind, theta in zip(kinds, (full, sliding), strict=True))
    outer = dict(rope_theta=None, original_max_position_embeddings=None)  # which no layer type takes
    whole, near = (raw | outer | {"rope_parameters": form} for form in forms)
    return whole, near | {"rope_scaling": None}


def rope(
    fields: Fields, *, max_position_embeddings: int, part: float | None = None, yarn_fields: frozenset[str] = frozenset()
) -> tuple[float, float, RopeScaling | None]:
    """Returns which part of a head is rotated, theta and the scaling of either form of the config.

    Args:
        part: of a head that is rotated where the config does not say; None: the family rotates whole heads.
        yarn_fields: what the family's `yarn` has beside the fields that all have.

    Raises:
        InputError: the rope type or one of its fields is not supported or out of range.
    """
    forms = {name: fields.take(name, dict, default={}) for name in ("rope_scaling", "rope_parameters")}
    # Where both are given transformers takes rope_scaling, which is how a reader stretches a published config.
    name = "rope_scaling" if forms["rope_scaling"] else "rope_parameters"
    form = Fields(forms[name], f"{fields.source}, {name}")
    named = (form, fields, Fields(forms["rope_parameters"], f"{fields.source}, rope_parameters"))
    thetas = [each.number("rope_theta", **THETA, default=None) for each in named]
    if name == "rope_scaling" and thetas[:2] == [None, None] and thetas[2] is not None and "rope_theta" not in fields.raw:
        LOG.warning("config.json: rope_theta is that of rope_parameters, beside rope_scaling: transformers takes its default")
    theta = next((value for value in thetas if value is not None), 1e4)
    kinds = [form.take(key, str, default=None) for key in ("rope_type", "type")]
    kind = kinds[0] or kinds[1] or "default"
    if part is None and kind != "proportional":
        if form.take("partial_rotary_factor", object, default=1.0) != 1.0:
            raise InputError(f"{form.source}: partial_rotary_factor other than 1.0 is not supported")
    elif part is not None:
        part = fields.number("partial_rotary_factor", **PART, default=part)
        part = form.number("partial_rotary_factor", **PART, default=part)
    if kind not in ROPE_FIELDS:
        raise InputError(f"{form.source}: rope type {quoted(kind)} is not supported ({', '.join(ROPE_FIELDS)} are)")
    known = form.taken | ROPE_FIELDS[kind] | (yarn_fields if kind == "yarn" else set())
    unknown = sorted(key for key, value in form.raw.items() if value is not None and key not in known)
    if unknown:
        raise InputError(
            f"{form.source}: fields {quoted(unknown)} of rope type {kind!r} are not known here "
            "and may change the model's numbers"
        )
    # As in transformers, what stands outside of the form comes first.
    original = form.whole("original_max_position_embeddings", default=max_position_embeddings)
    original = fields.whole("original_max_position_embeddings", default=original)
    if kind == "default":
        return part or 1.0, theta, None
    if kind in ("linear", "dynamic"):
        original = max_position_embeddings  # transformers stretches from here whatever else is written
    factor = form.number("factor", least=1, most=1e6, default=None)
    if factor is None and kind == "proportional":
        factor = 1.0
    if factor is None and kind not in ("yarn", "longrope"):
        raise InputError(f"{form.source}: rope type {kind!r} needs 'factor'")
    if factor is None:
        factor = numbers.number(f"{form.source}: the factor", max_position_embeddings / original, least=1, most=1e6)
    if kind in ("linear", "dynamic") and max_position_embeddings * factor > numbers.LARGEST:
        raise InputError(f"{form.source}: a context of {max_position_embeddings} x {factor:g} tokens is too long to count")
    given: dict[str, Any] = {}
    if kind == "llama3":
        given = {key: form.number(key, **SCALE) for key in ("low_freq_factor", "high_freq_factor")}
        if given["low_freq_factor"] >= given["high_freq_factor"]:
            raise InputError(f"{form.source}: 'low_freq_factor' must be below 'high_freq_factor', got {quoted(given)}")
    if kind == "yarn":
        if form.raw.get("attn_factor") is not None:
            LOG.warning("%s: attn_factor is not used, as in transformers", form.source)
        attention, scores = _yarn_factors(form, factor)
        given = dict(
            attention_factor=attention,
            beta_fast=form.number("beta_fast", **SCALE, default=32.0),
            beta_slow=form.number("beta_slow", **SCALE, default=1.0),
            truncate=form.take("truncate", bool, default=True),
            query_beta=form.number("llama_4_scaling_beta", least=0, most=1e6, default=0.0),
            score_factor=scores,
        )
    if kind == "proportional":
        given = dict(part=form.number("partial_rotary_factor", **PART, default=1.0))
    if kind == "longrope":
        numbers.integer(f"{form.source}: 'original_max_position_embeddings' of longrope", original, least=2)
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        given = dict(
            attention_factor=form.number("attention_factor", **SCALE, default=attention),
            factors=_factors(form, "long_factor"),
            short_factors=_factors(form, "short_factor"),
        )
    scaling = RopeScaling(rope_type=kind, factor=factor, original_max_position_embeddings=original, **given)
    return part or 1.0, theta, scaling


def _factors(form: Fields, name: str) -> tuple[float, ...]:
    return tuple(numbers.number(f"{form.source}: {name!r}", each, **SCALE) for each in form.take(name, list))


def _yarn_factors(form: Fields, factor: float) -> tuple[float, float]:
    """Returns what cos and sin are multiplied by, and the scores of latent attention.

    The former is the paper's temperature, or the ratio of the two scales that DeepSeek's configs give; the latter is the square
    of the second scale.
    """
    weights = [form.number(key, least=0, most=1e6, default=0.0) for key in ("mscale", "mscale_all_dim")]
    given = form.number("attention_factor", **SCALE, default=None)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    plain = scale(weights[0]) / scale(weights[1]) if all(weights) else scale(1.0)
    return plain if given is None else given, scale(weights[1]) ** 2
