"""Reads the fields of a Hugging Face config.json that families share; each family calls `common` first and `finish` last.

A field that transformers reads must be read, be known not to change logits, or raise an error that names it. A field that
transformers ignores is ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from typing import Any

from icejax.checks import errors
from icejax.checks.errors import InputError, quoted
from icejax.config import Experts, Rope, Routing
from icejax.models.hf.fields import Fields
from icejax.models.hf.reference_fields import BY_FAMILY, EVERYWHERE
from icejax.models.hf.rope_scaling import by_type, rope

LOG = logging.getLogger(__name__)
MOST_EXPERTS = 1024
ROTARY_TABLES = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"  # in old checkpoints; computed from the config here
SOFTMAX = Routing(score="softmax", choice_bias=False, groups=1, chosen_groups=1, group_best=2, normalised=True, factor=1.0)
SIGMOID = Routing(score="sigmoid", choice_bias=True, groups=1, chosen_groups=1, group_best=2, normalised=True, factor=1.0)
# Fields that transformers reads and that change no logit; `checkpoint/quantized/formats.py` reads quantization_config.
IRRELEVANT = frozenset(
    """architectures attention_dropout attn_implementation bos_token_id chunk_size_feed_forward dtype embd_pdrop eos_token_id
    experts_implementation id2label initializer_range is_encoder_decoder label2id name_or_path num_labels num_mtp_layers
    output_attentions output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type qk_head_dim
    resid_pdrop return_dict rope_parameters rope_scaling rope_theta router_aux_loss_coef router_jitter_noise sliding_window
    torch_dtype transformers_version use_cache use_double_wide_mlp use_sliding_window vocab_size_per_layer_input""".split()
)
# Fields of folders that nobody needs to be told of: no code of transformers computes with them.
USUAL = frozenset("auto_map model_type _name_or_path quantization_config".split())
# Fields that may change logits, with the only supported values.
NEUTRAL = {"hidden_act": ("silu",), "is_causal": (True,), "partial_rotary_factor": (1.0,)}


def finish(fields: Fields, *, neutral: Mapping[str, tuple] = NEUTRAL) -> None:
    """Raises InputError for a field that may change logits and was not read: transformers' code of the family reads it.

    Args:
        neutral: supported values of fields that are not read.
    """
    read = EVERYWHERE | BY_FAMILY[fields.raw["model_type"]]
    if ignored := sorted(fields.others() - read - USUAL):
        LOG.info("%s: fields that transformers ignores are ignored: %s", fields.source, errors.listed([*map(quoted, ignored)]))
    fields.refuse_others(neutral=neutral, irrelevant=IRRELEVANT | set(ignored) | USUAL)


def common(
    raw: dict[str, Any], *, part: float | None = None, yarn_fields: frozenset[str] = frozenset()
) -> tuple[Fields, dict[str, Any]]:
    """Returns the field reader, and the ModelConfig fields that all families share; `part` and `yarn_fields` as in `rope`.

    Reads the formats of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, `dtype`).

    Raises:
        InputError: a field is missing, of the wrong type or out of its range.
    """
    fields = Fields(raw)
    if fields.take("dual_chunk_attention_config", dict, default={}):
        LOG.warning("config.json: dual_chunk_attention_config is not used, as in transformers: attention stays plain")
    hidden = fields.whole("hidden_size", most=2**20)
    heads = fields.whole("num_attention_heads", most=2**14)
    kv_heads = fields.whole("num_key_value_heads", most=heads, default=heads)
    context = fields.whole("max_position_embeddings", default=2048)
    size = fields.whole("head_dim", most=2**12, default=None) or hidden // heads
    dtype = fields.take("dtype", str, default="") or fields.take("torch_dtype", str, default="float32")
    part, theta, scaling = rope(fields, max_position_embeddings=context, part=part, yarn_fields=yarn_fields)
    rotated = int(size * part)
    values = dict(
        model_type=raw["model_type"],
        vocab_size=fields.whole("vocab_size", most=2**24),
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size", most=2**22),
        num_hidden_layers=fields.whole("num_hidden_layers", most=1024),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=size,
        rotary_dim=rotated,
        rms_norm_eps=fields.number("rms_norm_eps", least=0, most=1, above=True, default=1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=context,
        tie_word_embeddings=fields.take("tie_word_embeddings", bool, default=False),
        dtype=dtype.removeprefix("torch."),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )
    if heads % kv_heads:
        raise InputError(f"config.json: {heads} attention heads do not divide among {kv_heads} KV heads")
    check_rotated(size if size % 2 else rotated)
    for factors in () if scaling is None or scaling.rope_type != "longrope" else (scaling.factors, scaling.short_factors):
        if len(factors) != rotated // 2:
            raise InputError(f"config.json: {rotated // 2} frequencies need as many factors, got {len(factors)}")
    return fields, values


def check_rotated(size: int) -> None:
    """Raises InputError if heads of this size cannot be rotated in pairs."""
    if size % 2 or size < 4:
        raise InputError(f"config.json: heads must have an even size of at least 4 to be rotated, got {size}")


def common_by_type(raw: dict[str, Any], *, full: float, sliding: float) -> tuple[Fields, dict[str, Any]]:
    """Returns what `common` does, with a RoPE for each layer type; its default theta is `full` or `sliding`."""
    raw, sliding_raw = by_type(raw, full=full, sliding=sliding)
    fields, values = common(raw)
    _, theta, scaling = rope(Fields(sliding_raw), max_position_embeddings=values["max_position_embeddings"])
    return fields, values | dict(sliding_rope=Rope(size=values["rotary_dim"], theta=theta, scaling=scaling))


def experts(
    fields: Fields,
    *,
    count: str,
    size: str,
    chosen: str = "num_experts_per_tok",
    routing: Routing,
    shared: int = 0,
    shared_gated: bool = False,
) -> Experts:
    """Returns the experts of a config.

    Args:
        count, size, chosen: names of the fields for the number of experts, their inner size and the experts per token.
        routing, shared, shared_gated: as in `Experts`.

    Raises:
        InputError: a field is missing or out of its range, or experts do not divide among the groups.
    """
    num_experts = fields.whole(count, most=MOST_EXPERTS)
    groups, least = routing.groups, routing.group_best
    if num_experts % groups or (groups > 1 and num_experts < least * groups):
        raise InputError(f"config.json: {num_experts} experts do not divide among {groups} groups of {least} or more")
    return Experts(
        count=num_experts,
        chosen=fields.whole(chosen, most=num_experts // groups * routing.chosen_groups),
        size=fields.whole(size, most=2**22),
        routing=routing,
        shared=shared,
        shared_gated=shared_gated,
    )


def layer_types(fields: Fields, count: int, *, window: int | None, sliding: Container[int] | None) -> dict[str, Any]:
    """Returns the fields `layer_types` of `count` layers and `sliding_window`.

    The types are those of the config, or by default sliding for the layers in `sliding` if there is a window, else full.

    Args:
        window: the sliding window in tokens; None: none in use.
        sliding: indices of the sliding layers; None: all layers, and the config may list nothing else, because transformers
            does not read the list of these families.

    Raises:
        InputError: the list has another length, another type, or sliding layers without a window.
    """
    listed = fields.take("layer_types", list, default=None)
    sliding_layers = range(count) if sliding is None else sliding
    defaults = ["sliding_attention" if window is not None and i in sliding_layers else "full_attention" for i in range(count)]
    if sliding is None and listed not in (None, defaults):
        raise InputError(
            f"config.json: layer_types of a {fields.raw['model_type']} model must all be {defaults[0]}, as its sliding_window "
            f"says, got {quoted(listed)}"
        )
    listed = defaults if listed is None else listed
    if len(listed) != count or any(kind not in ("full_attention", "sliding_attention") for kind in listed):
        raise InputError(
            "config.json: layer_types must name full_attention or sliding_attention "
            f"for {count} layers, got {quoted(listed)} ({len(listed)})"
        )
    slides = "sliding_attention" in listed
    if slides and window is None:
        raise InputError("config.json: layer_types has sliding layers and no sliding_window is in use")
    return dict(layer_types=tuple(listed), sliding_window=window if slides else None)
