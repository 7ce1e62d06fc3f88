"""The tensors of a checkpoint folder of any form, checked against its config.json before they are read.

`icejax.checkpoint.load` and `icejax.checkpoint.convert` call it. A stored tensor keeps its shape and dtype; codes of a matrix
[O, I] are a `QuantizedMatrix`, with codes [O, I] and scales f32[O, G].
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from icejax.checkpoint.folder import ORBAX, is_made_of_gguf
from icejax.checkpoint.quantized import formats
from icejax.checkpoint.quantized.formats import EMBEDDING, HEAD, Source
from icejax.checkpoint.quantized.layouts import FLOATS, Layout, Part, QuantizedMatrix
from icejax.checkpoint.quantized.rounding import METHODS
from icejax.checkpoint.readers import huggingface
from icejax.checkpoint.tensor_mapping import TensorMapping, tensor_mappings
from icejax.checks import numbers
from icejax.checks.errors import InputError, listed
from icejax.config import ModelConfig
from icejax.models.registry import family

LOG = logging.getLogger(__name__)
NAMES = {name: short for short, name in huggingface.DTYPES.items()}


class Stored(NamedTuple):
    """A tensor of a folder.

    Attributes:
        shape: its shape.
        dtype: its dtype, as safetensors names it.
        read: reads and returns its array, or a box of it (`checkpoint.boxes`).
        layout: layout of the codes that it holds, where its dtype says that; None: config.json says how codes are stored.
        in_boxes: whether `read` takes a box.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[..., np.ndarray]
    layout: Layout | None = None
    in_boxes: bool = True


@dataclass(frozen=True)
class Tensors:
    """The tensors of a folder, checked against its config.json.

    Attributes:
        quantised: how matrices became codes, as messages say it; None: no matrix is quantised.
        mappings: the tensors that each parameter is joined from, by the parameter's key.
        sources: the stored parts of each tensor that a mapping names, by the tensor's key.
        stored: the tensors in the folder, by their stored keys.
        skipped: keys of the folder's other tensors, which hold no parameter of the model.
    """

    quantised: str | None
    mappings: dict[str, TensorMapping]
    sources: dict[str, Source]
    stored: dict[str, Stored]
    skipped: tuple[str, ...] = ()

    def read(self, key: str) -> np.ndarray | QuantizedMatrix:
        """Returns the tensor `key` as stored, or as codes; InputError for invalid codes."""
        return self.sources[key].read(self.parts(key))

    def parameters(
        self, dtypes: Mapping[str, np.dtype], *, kept: Set[str], on_cpu: bool
    ) -> Iterator[tuple[str, np.ndarray | QuantizedMatrix]]:
        """Yields each parameter's key and value; reads every tensor once.

        Args:
            dtypes: dtypes of the parameters that are not codes, by key.
            kept: keys of the parameters that stay codes.
            on_cpu: whether narrow numbers in `kept` take the form that a CPU needs.
        """
        groups: dict[tuple[str, ...], list[str]] = {}
        for key, mapping in self.mappings.items():
            groups.setdefault(mapping.keys, []).append(key)
        for tensor_keys, parameter_keys in groups.items():
            source, parts = self.sources[tensor_keys[0]], {}
            if self.mappings[parameter_keys[0]].whole or len(parameter_keys) > 1:
                parts = self.parts(tensor_keys[0])
            for key in parameter_keys:
                mapping = self.mappings[key]
                if mapping.whole:
                    matrices = (source.read(parts, expert=i) for i in range(mapping.experts))
                else:
                    matrices = [source.read(parts)] if parts else map(self.read, tensor_keys)
                options = dict(dtype=dtypes[key], codes=key in kept, on_cpu=on_cpu, method=source.method)
                yield key, mapping.join(matrices, **options)
            del parts, matrices  # else they are in memory while the next tensors are read

    def alike(self, stack: TensorMapping) -> bool:
        """Says whether all tensors of a parameter have one form: no codes, or codes in one layout with the same parts."""
        return len(set(map(self._form, stack.keys))) == 1

    def _form(self, key: str) -> tuple | None:
        """Returns the layout of the codes of `key` and the names of its stored parts; None: `key` has no codes."""
        layout = self.sources[key].layout
        if layout is None:
            return None
        return layout, *(part.removeprefix(layout.prefix(key)) for part in self.sources[key].parts if part in self.stored)

    def about(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Returns the shape and dtype, as safetensors names it, of each tensor that `pieces` yields, by key."""
        stored = {key: (tensor.shape, tensor.dtype) for key, tensor in self.stored.items()}
        by_source = (
            source.about({part: stored[part] for part in source.parts if part in stored}) for source in self.sources.values()
        )
        return {key: entry for entries in by_source for key, entry in entries.items()}

    def parts(self, key: str) -> dict[str, np.ndarray]:
        """Reads the stored parts of the tensor `key`."""
        return {part: self.stored[part].read() for part in self.sources[key].parts if part in self.stored}


def open_tensors(
    folder: Path,
    config: ModelConfig,
    shapes: dict[str, tuple[int, ...]],
    *,
    quantize: str | None = None,
    as_codes: bool = False,
) -> Tensors:
    """Returns the tensors of `folder`, checked but not read.

    Args:
        shapes: shapes of the model's parameters, by key.
        quantize: int8, fp8 or int4: matrices are rounded as they are read; None: nothing is rounded.
        as_codes: whether the matrices of a GGUF file are read as codes, where their type has scales per group; else all of its
            numbers are dequantised.

    Raises:
        InputError: keys are missing, unknown or stored twice, or have a wrong shape or an unsupported dtype; or a matrix to be
            rounded is codes already, or its columns do not divide into groups.
    """
    raw = huggingface.read_json(folder / "config.json")
    hf_family, method = family(raw), formats.method(raw)
    ignored, contents = hf_family.ignored_keys(raw), list(stored_tensors(folder, as_codes=as_codes))
    forms, keys = [tensor_mappings(shapes, hf_family, form) for form in hf_family.renamings], {key for key, _ in contents}
    mappings = next((form for form in forms if form[EMBEDDING].keys[0] in keys), forms[0])
    tensor_shapes = {key: mapping.shape for mapping in mappings.values() for key in mapping.keys}
    if quantize is not None:
        numbers.one_of("quantize", quantize, tuple(METHODS))
        if method is not None:
            raise InputError(
                f"{folder} is quantised by {method} already: leave quantize out, or use the folder that it was made from"
            )
    by_form = [[key for mapping in form.values() for key in mapping.keys] for form in (mappings, *forms)]
    names = {key: aliases for key, *aliases in zip(*by_form, strict=True)}
    sources = formats.sources(raw, tensor_shapes, rounding=METHODS.get(quantize), names=names)
    formats.check_groups(sources, {key: mapping.columns for mapping in mappings.values() for key in mapping.keys})
    in_blocks = {key: tensor for key, tensor in contents if tensor.layout is not None and key in sources}
    for key, tensor in in_blocks.items():
        part = Part((tensor.dtype,), (sources[key].shape,))
        sources[key] = replace(sources[key], layout=tensor.layout, parts={key: part})
    expected = {key: part for source in sources.values() for key, part in source.parts.items()}
    faults, stored, skipped, tied = [], {}, [], Part(FLOATS, (mappings[EMBEDDING].shape,))
    for key, tensor in contents:
        if ignored.fullmatch(key):
            skipped.append(key)
            continue
        if key in stored:
            faults.append(f"{key} is stored twice")
        elif key in expected or (key.endswith(HEAD) and config.tie_word_embeddings):  # a copy of the embedding
            faults += expected.get(key, tied).faults(key, tensor.shape, tensor.dtype)
        else:
            faults.append(f"{key} is not a parameter of this model")
        stored[key] = tensor
    faults += [f"{key} is missing" for key, part in expected.items() if part.needed and key not in stored]
    for mapping in mappings.values():
        dtypes = sorted({stored[key].dtype for key in mapping.keys if key in stored and sources[key].layout is None})
        if len(dtypes) > 1:
            faults.append(f"{mapping.keys[0]} to {mapping.keys[-1]} are stored in {' and '.join(dtypes)}: expected one dtype")
    if faults:
        note = "" if method is None else f" (weights quantised by {method})"
        raise InputError(f"{_misfit(folder)}{note}: {listed(faults)}")
    if is_made_of_gguf(folder):
        from icejax.checkpoint.readers import gguf

        gguf.tell_types(folder, as_codes=as_codes)
    if skipped:
        LOG.info("%d tensors hold no parameter and are skipped: %s", len(skipped), listed(skipped))
    quantised = f"quantised by {method}" if method is not None else f"rounded to {quantize}" if quantize is not None else None
    quantised = "stored in GGUF's types" if in_blocks else quantised
    return Tensors(quantised, mappings, sources, stored, tuple(skipped))


def _misfit(folder: Path) -> str:
    """Returns the beginning of a message about a folder's tensors; it names the GGUF file where the folder is made of one."""
    if not is_made_of_gguf(folder):
        return f"{folder} does not fit its config.json"
    from icejax.checkpoint.gguf.folder import pointed_model

    return f"{pointed_model(folder).files[0]} does not fit its metadata"


def has_own_head(folder: Path) -> bool:
    """Says whether a folder holds an output head that differs from its embedding; reads both if they look alike."""
    head, embedding = (
        next((tensor for key, tensor in stored_tensors(folder) if key.endswith(name)), None)
        for name in (HEAD, EMBEDDING.removeprefix("model."))
    )
    if head is None or embedding is None or head.shape != embedding.shape or {head.dtype, embedding.dtype} - {*FLOATS}:
        return head is not None
    return not all(map(np.array_equal, head.read(), embedding.read()))  # row by row, to save memory


def stored_tensors(folder: Path, *, as_codes: bool = False) -> Iterator[tuple[str, Stored]]:
    """Yields the key and tensor of everything that a folder of any form holds; `as_codes` as in `open_tensors`."""
    path = folder / ORBAX
    if is_made_of_gguf(folder):
        from icejax.checkpoint.readers import gguf

        for key, *about in gguf.keys(folder, as_codes=as_codes):
            yield key, Stored(*about)
    elif path.is_dir():
        from icejax.checkpoint.readers import orbax  # takes most of a second to import

        for key, about in orbax.stored(path).items():
            dtype, read = NAMES.get(str(about.dtype), str(about.dtype)), functools.partial(orbax.read, path, key, about)
            yield key, Stored(about.shape, dtype, read, in_boxes=about.in_boxes)
    else:
        for key, file, shape, dtype in huggingface.keys(huggingface.shards(folder)):
            yield key, Stored(shape, dtype, functools.partial(huggingface.read_tensor, file, key))
