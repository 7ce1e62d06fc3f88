"""The `quantization_config` of a config.json: which matrices of a folder are stored as codes, and in which layout.

`icejax.checkpoint.tensors` calls it. A parameter is read from its stored parts: a matrix [O, I] (or [E, O, I] of all experts)
as codes [O, I] with scales and zero points [O, G].
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from icejax.checkpoint.quantized.float4 import Float4, Mxfp4
from icejax.checkpoint.quantized.layouts import FLOATS, Awq, Gptq, Layout, Packed, Part, Plain, QuantizedMatrix, Shape
from icejax.checkpoint.quantized.module_names import SOURCE, ModuleMatcher, module_names
from icejax.checkpoint.quantized.rounding import Method
from icejax.checks import numbers
from icejax.checks.errors import InputError, quoted
from icejax.models.hf.fields import Fields

LOG = logging.getLogger(__name__)
LINEAR = "Linear"  # the class of a module, as compressed-tensors names it
SMALLEST_GROUP = 16  # columns per scale: fewer would take more bits than int8
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
KEPT = (EMBEDDING, HEAD, ".gate.weight", ".router.weight", ".router.proj.weight")  # never quantised
# Fields about how codes were computed, or about other runtimes: they do not change what codes mean.
IRRELEVANT = frozenset(
    """activation_scheme act_group_aware backend batch_size block_name_to_quantize cache_block_outputs damp_auto_increment
    damp_percent dataset dequantize do_fuse exllama_config fuse_max_seq_len global_compression_ratio input_activations
    max_input_length meta model_file_base_name model_name_or_path model_seqlen modules_to_fuse
    module_name_preceding_first_block observer observer_kwargs output_activations pack_dtype pad_token_id quant_method
    quantization_status run_compressed scale_dtype scale_fmt static_groups sym tokenizer true_sequential use_cuda_fp16
    use_exllama use_optimized_inference version zp_dtype""".split()
)
# Fields that can change what codes mean, with the values that do not.
NEUTRAL = {
    "desc_act": (False,),
    "dynamic": (False, {}),
    "expert_dtype": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "is_marlin_format": (False,),
    "kv_cache_scheme": (None,),
    "lm_head": (False,),
    "modules_to_convert": ([],),
    "transform_config": ({},),
    "zero_point": (True,),
}
# compressed-tensors: the allowed type and bits of codes, by format.
COMPRESSED = {
    "float-quantized": ("float", (8,)), "int-quantized": ("int", (8,)), "pack-quantized": ("int", (4, 8)),
    "mxfp4-pack-quantized": ("float", (4,)), "nvfp4-pack-quantized": ("float", (4,)),
}  # fmt: skip
Layouts = Callable[[Sequence[str]], Layout | None]  # names of a module -> its layout; None: not quantised


@dataclass(frozen=True)
class Source:
    """The stored tensors that a parameter is read from.

    Attributes:
        key: key of the parameter.
        shape: shape of the parameter.
        parts: stored tensors, by key.
        layout: layout of the parameter's codes; None: the parameter is not quantised.
        method: how the parameter is rounded as it is read: its only part is then the parameter itself; None: it is not rounded.
    """

    key: str
    shape: tuple[int, ...]
    parts: dict[str, Part]
    layout: Layout | None = None
    method: Method | None = None

    def read(
        self, tensors: dict[str, np.ndarray], *, expert: int | None = None, window: Shape | None = None
    ) -> np.ndarray | QuantizedMatrix:
        """Returns the parameter from its stored tensors, as stored or as codes.

        InputError if the tensors are not valid codes.

        Args:
            expert: the expert whose matrix is returned; None: all.
            window: shape of the window of the matrix that is returned, whose boxes `tensors` are; None: all of it.
        """
        if self.layout is None or self.method is not None:
            tensor = next(iter(tensors.values()))
            return tensor if expert is None else tensor[expert]
        prefix, shape = self.layout.prefix(self.key), self.shape if expert is None else self.shape[1:]
        parts = {key.removeprefix(prefix): tensor if expert is None else tensor[expert] for key, tensor in tensors.items()}
        try:
            self.layout.check(shape, parts)
        except InputError as error:
            raise InputError(f"{prefix}{error}: fetch the folder again") from None
        return self.layout.codes(shape if window is None else window, parts)

    def about(self, stored: dict[str, tuple[Shape, str]]) -> dict[str, tuple[Shape, str]]:
        """Returns shape and dtype of each tensor that `rounded` returns, from shape and dtype of each stored tensor."""
        if self.method is None:
            return stored
        return {f"{self.layout.prefix(self.key)}{name}": entry for name, entry in self.layout.about(self.shape).items()}

    def rounded(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the tensors to write of some rows of a matrix that is rounded, by key."""
        prefix, codes = self.layout.prefix(self.key), self.method.rounded(rows)
        return {f"{prefix}{name}": part for name, part in self.layout.stored(codes, self.shape).items()}


def method(raw: dict[str, Any]) -> str | None:
    """Returns the name of the quantisation method in a raw config.json; None: the weights are not quantised.

    Raises:
        InputError: the method is not supported.
    """
    fields = Fields(raw).take("quantization_config", dict, default=None)
    if fields is None:
        return None
    name = Fields(fields, SOURCE).take("quant_method", str, default="")
    if not name and {"bits", "group_size"} <= fields.keys():
        raise InputError(f"{SOURCE} is MLX's, which is not read: take the folder it was made from, and round it by --quantize")
    if name not in METHODS:
        raise InputError(f"{SOURCE}: quant_method {quoted(name)} is not supported: expected one of {', '.join(METHODS)}")
    return name


def sources(
    raw: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    *,
    rounding: Method | None = None,
    names: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Source]:
    """Returns the stored tensors of each parameter of a folder with this raw config.json, by the parameter's key.

    Args:
        shapes: shapes of the parameters, by key.
        rounding: how matrices that are not quantised are rounded; None: they are not.
        names: names that `quantization_config` may use for each parameter, by key; None: the key alone.

    Raises:
        InputError: `quantization_config` is invalid or not supported.
    """
    layouts, by_key = _layouts(raw if rounding is None else {"quantization_config": rounding.config()}), {}
    for key, shape in shapes.items():
        layout = layouts([name.removesuffix(".weight") for name in ([key] if names is None else names[key])])
        unquantised = key.endswith(KEPT) or not (key.endswith(".weight") or len(shape) == 3)
        if unquantised or (layout is not None and len(shape) not in ((2, 3) if rounding is not None else (layout.axes,))):
            layout = None
        if layout is not None and rounding is not None:
            layout = replace(layout, block=(1, rounding.group_in(shape[-1])))
        parts = {key: Part(FLOATS, (shape,))}
        if layout is not None and rounding is None:  # a part under another parameter's key, as a bias, is left to it
            stored = {f"{layout.prefix(key)}{part}": value for part, value in layout.parts(shape).items()}
            parts = {part: value for part, value in stored.items() if part == key or part not in shapes}
        by_key[key] = Source(key, shape, parts, layout, rounding if layout is not None else None)
    return by_key


def check_groups(sources: Mapping[str, Source], columns: Mapping[str, int]) -> None:
    """Logs that some matrices to be rounded get smaller groups; InputError if their groups would be too small.

    Args:
        columns: number of columns of each matrix, by key.
    """
    rounded = {key: source.method for key, source in sources.items() if source.method is not None and source.method.group}
    sizes = {key: method.group_in(columns[key]) for key, method in rounded.items()}
    if tiny := [key for key, size in sizes.items() if size < SMALLEST_GROUP]:
        raise InputError(
            f"int4 needs widths that {SMALLEST_GROUP} divides, and {tiny[0]} has {columns[tiny[0]]} columns "
            f"({len(tiny)} of {len(sizes)} matrices): use int8 or fp8"
        )
    if smaller := [size for key, size in sizes.items() if size < rounded[key].group]:
        LOG.warning(
            "int4: groups have %s instead of 128 columns in %d of %d matrices, whose widths 128 does not divide",
            " or ".join(map(str, sorted(set(smaller)))), len(smaller), len(sizes),
        )  # fmt: skip


def _layouts(raw: dict[str, Any]) -> Layouts:
    """Returns the function from the names of a module to its layout, as `quantization_config` says."""
    if (name := method(raw)) is None:
        return lambda names: None
    fields = Fields(raw["quantization_config"], SOURCE)
    layouts = METHODS[name](fields)
    fields.refuse_others(neutral=NEUTRAL, irrelevant=IRRELEVANT)
    return layouts


def _fp8(fields: Fields) -> Layouts:
    block = _block(fields, "weight_block_size", default=(None, None))
    layout = Plain(block=block, dtype="F8_E4M3", scale_name="weight_scale_inv")
    return _except(module_names(fields, "modules_to_not_convert") + module_names(fields, "ignored_layers"), layout)


def _awq(fields: Fields) -> Layouts:
    numbers.one_of(f"{SOURCE}: 'bits'", fields.whole("bits", default=4), (4,))
    names = [fields.take(name, str, default="") for name in ("version", "checkpoint_format", "format")]  # one, or all
    numbers.one_of(f"{SOURCE}: 'version'", next(filter(None, names), "gemm").lower(), ("gemm",))
    return _except(module_names(fields, "modules_to_not_convert"), Awq(block=(1, _group(fields, "group_size", default=128))))


def _gptq(fields: Fields) -> Layouts:
    bits = fields.whole("bits")
    numbers.one_of(f"{SOURCE}: 'bits'", bits, (4, 8))
    version = fields.take("checkpoint_format", str, default="") or fields.take("format", str, default="gptq")
    fields.take("format", str, default="gptq")
    numbers.one_of(f"{SOURCE}: 'checkpoint_format'", version, ("gptq", "gptq_v2"))
    layout = Gptq(block=(1, _group(fields, "group_size", default=128)), bits=bits, less=int(version == "gptq"))
    return _except(module_names(fields, "modules_to_not_convert"), layout)


def _mxfp4(fields: Fields) -> Layouts:
    excluded, layout = module_names(fields, "modules_to_not_convert"), Mxfp4()
    return lambda names: None if any(fnmatchcase(f".{x}.", f"*.{name}.*") for x in names for name in excluded) else layout


def _compressed(fields: Fields) -> Layouts:
    ignored, modules = module_names(fields, "ignore"), ModuleMatcher()
    default = fields.take("format", str, default="")
    sparsity = Fields(fields.take("sparsity_config", dict, default={})).take("format", str, default="dense")
    numbers.one_of(f"{SOURCE}: 'format' of sparsity_config", sparsity, ("dense",))
    groups = []
    for name, raw in fields.take("config_groups", dict).items():
        if not isinstance(raw, dict):
            raise InputError(f"{SOURCE}: config_groups.{name} must be an object, got {quoted(raw)}")
        group = Fields(raw, f"{SOURCE}: config_groups.{name}")
        targets, stored_format = module_names(group, "targets"), group.take("format", str, default=default)
        weights = group.take("weights", dict, default=None)
        group.refuse_others(neutral=NEUTRAL, irrelevant=IRRELEVANT)
        layout = None if weights is None else _compressed_layout(stored_format, Fields(weights, f"{group.source}.weights"))
        groups += [(target, layout) for target in targets]
    # As in compressed-tensors: a module's name counts before an expression, and this before the class.
    groups.sort(key=lambda group: (group[0] == LINEAR, group[0].startswith("re:"), group[0]))

    def layout(names: Sequence[str]) -> Layout | None:
        if modules.fits_any(names, ignored):
            return None
        return next((layout for target, layout in groups if target == LINEAR or modules.fits_any(names, [target])), None)

    return layout


def _compressed_layout(stored_format: str, fields: Fields) -> Layout:
    """Returns the layout of a group of modules, from its format and the fields of its `weights`."""
    numbers.one_of(f"{SOURCE}: 'format'", stored_format, tuple(COMPRESSED))
    kind, widths = COMPRESSED[stored_format]
    bits = fields.whole("num_bits")
    numbers.one_of(f"{fields.source}: 'type' of {stored_format}", fields.take("type", str, default="int"), (kind,))
    numbers.one_of(f"{fields.source}: 'num_bits' of {stored_format}", bits, widths)
    numbers.one_of(f"{fields.source}: 'actorder'", fields.take("actorder", str, default="static"), ("static", "weight"))
    symmetric = fields.take("symmetric", bool, default=True)
    group, block = _group(fields, "group_size", default=-1), _block(fields, "block_structure", default=None)
    blocks = {"tensor": (None, None), "channel": (1, None), "group": (1, group), "tensor_group": (1, group), "block": block}
    strategy = fields.take("strategy", str, default="tensor" if group is None else "group")
    numbers.one_of(f"{fields.source}: 'strategy'", strategy, tuple(blocks))
    if blocks[strategy] is None:
        raise InputError(f"{fields.source} has no 'block_structure', which the strategy 'block' needs")
    fields.refuse_others(neutral=NEUTRAL, irrelevant=IRRELEVANT)
    if bits == 4 and kind == "float":
        return Float4(block=blocks[strategy], powers=stored_format == "mxfp4-pack-quantized")
    if stored_format == "pack-quantized":
        return Packed(block=blocks[strategy], bits=bits, symmetric=symmetric)
    return Plain(block=blocks[strategy], dtype="I8" if kind == "int" else "F8_E4M3", scale_name="weight_scale")


METHODS = {"fp8": _fp8, "compressed-tensors": _compressed, "awq": _awq, "gptq": _gptq, "mxfp4": _mxfp4}


def _except(names: tuple[str, ...], layout: Layout) -> Layouts:
    """Returns `layout` for every module without one of `names` in its own: mlp.gate is in 0.mlp.gate, not in 0.mlp.gates."""
    return lambda modules: None if any(f".{name}." in f".{module}." for module in modules for name in names) else layout


def _group(fields: Fields, name: str, *, default: int) -> int | None:
    """Returns a group size in columns; None for -1, all columns."""
    size = fields.whole(name, least=-1, default=default)
    return None if size == -1 else numbers.integer(f"{fields.source}: {name!r}", size)


def _block(fields: Fields, name: str, *, default: Any) -> Any:
    """Returns the rows and columns of a block; InputError unless there are two whole numbers."""
    sizes = fields.take(name, list, default=None)
    if sizes is None:
        return default
    if len(sizes) != 2:
        raise InputError(f"{fields.source}: {name!r} must be rows and columns, got {quoted(sizes)}")
    rows, columns = (numbers.integer(f"{fields.source}: {name!r}", size) for size in sizes)
    return rows, columns
