"""The tensors of a checkpoint folder, of either form: every key once, and all faults told before the first is read."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from icejax.checkpoint.folder import ORBAX
from icejax.checkpoint.quantized import formats
from icejax.checkpoint.quantized.formats import EMBEDDING, HEAD, Source
from icejax.checkpoint.quantized.layouts import FLOATS, Part, QuantizedMatrix
from icejax.checkpoint.quantized.rounding import METHODS
from icejax.checkpoint.readers import huggingface, orbax
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
        dtype: as safetensors names it.
        read: returns it.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Tensors:
    """The tensors of a folder, which fit its config.json.

    Attributes:
        quantised: how matrices come to be codes; None: none do.
        mappings: of which of them each parameter is made, by its key.
        sources: what each of those is read from, by its key.
        stored: what there is, by key.
    """

    quantised: str | None
    mappings: dict[str, TensorMapping]
    sources: dict[str, Source]
    stored: dict[str, Stored]

    def read(self, key: str) -> np.ndarray | QuantizedMatrix:
        """Returns the tensor `key` as stored, or its codes; InputError if these are not sound."""
        return self.sources[key].read(self._parts(key))

    def parameters(
        self, dtypes: Mapping[str, np.dtype], *, kept: Set[str], on_cpu: bool
    ) -> Iterator[tuple[str, np.ndarray | QuantizedMatrix]]:
        """Yields every parameter with its key, in `dtypes`, or as codes if it is of `kept`; reads every tensor once.

        `on_cpu` says that narrow numbers of `kept` take the forms that a CPU needs.
        """
        together: dict[tuple[str, ...], list[str]] = {}
        for key, stack in self.mappings.items():
            together.setdefault(stack.keys, []).append(key)
        for keys, made in together.items():
            source, parts = self.sources[keys[0]], {}
            if self.mappings[made[0]].whole or len(made) > 1:
                parts = self._parts(keys[0])
            for key in made:
                stack = self.mappings[key]
                if stack.whole:
                    matrices = (source.read(parts, expert=i) for i in range(stack.experts))
                else:
                    matrices = [source.read(parts)] if parts else map(self.read, keys)
                how = dict(dtype=dtypes[key], codes=key in kept, on_cpu=on_cpu, method=source.method)
                yield key, stack.join(matrices, **how)
            del parts, matrices  # or they would be there beside the next ones

    def alike(self, stack: TensorMapping) -> bool:
        """Says whether all tensors of a parameter are of one form: no codes, or codes in one layout with the same parts."""
        return len(set(map(self._form, stack.keys))) == 1

    def _form(self, key: str) -> tuple | None:
        """Returns what the codes of `key` are told by; None: there are none."""
        layout = self.sources[key].layout
        if layout is None:
            return None
        return layout, *(part.removeprefix(layout.prefix(key)) for part in self.sources[key].parts if part in self.stored)

    def about(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Returns shape and dtype, as safetensors names it, of each tensor that `written` yields."""
        stored = {key: (tensor.shape, tensor.dtype) for key, tensor in self.stored.items()}
        found = (each.about({part: stored[part] for part in each.parts if part in stored}) for each in self.sources.values())
        return {key: each for some in found for key, each in some.items()}

    def written(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields what a folder with the same parameters holds, with its keys; those of one parameter at a time are there."""
        for key, source in self.sources.items():
            yield from source.written(self._parts(key)).items()

    def _parts(self, key: str) -> dict[str, np.ndarray]:
        return {part: self.stored[part].read() for part in self.sources[key].parts if part in self.stored}


def open_tensors(
    folder: Path, config: ModelConfig, shapes: dict[str, tuple[int, ...]], *, quantize: str | None = None
) -> Tensors:
    """Returns the tensors of `folder`, of which none but a tied head has been read.

    Args:
        shapes: of the parameters of its model, by key.
        quantize: int8, fp8 or int4, to which matrices are rounded as they are read; None: they are not.

    Raises:
        InputError: keys are missing, unknown, stored twice, of another shape or of a dtype that is not supported; or matrices
            that are to be rounded are codes already, or of columns that make no whole groups.
    """
    raw = huggingface.read_json(folder / "config.json")
    of, method = family(raw), formats.method(raw)
    ignored, there = of.ignored_keys(raw), list(stored_tensors(folder))
    forms, keys = [tensor_mappings(shapes, of, form) for form in of.forms], {key for key, _ in there}
    made_of = next((form for form in forms if form[EMBEDDING].keys[0] in keys), forms[0])
    each = {key: stack.shape for stack in made_of.values() for key in stack.keys}
    if quantize is not None:
        numbers.one_of("quantize", quantize, tuple(METHODS))
        if method is not None:
            raise InputError(f"{folder} is quantised by {method} already: leave quantize out, or take what it was made from")
    by_form = [[key for stack in form.values() for key in stack.keys] for form in (made_of, *forms)]
    names = {key: others for key, *others in zip(*by_form, strict=True)}
    sources = formats.sources(raw, each, rounding=METHODS.get(quantize), names=names)
    formats.check_groups(sources, {key: stack.columns for stack in made_of.values() for key in stack.keys})
    expected = {key: part for each in sources.values() for key, part in each.parts.items()}
    faults, stored, passed, tied = [], {}, [], Part(FLOATS, (made_of[EMBEDDING].shape,))
    for key, tensor in there:
        if ignored.fullmatch(key):
            passed.append(key)
            continue
        if key in stored:
            faults.append(f"{key} is stored twice")
        elif key in expected or (key == HEAD and config.tie_word_embeddings):
            faults += expected.get(key, tied).faults(key, tensor.shape, tensor.dtype)
        else:
            faults.append(f"{key} is not a parameter of this model")
        stored[key] = tensor
    faults += [f"{key} is missing" for key, part in expected.items() if part.needed and key not in stored]
    for each in made_of.values():
        dtypes = sorted({stored[key].dtype for key in each.keys if key in stored and sources[key].layout is None})
        if len(dtypes) > 1:
            faults.append(f"{each.keys[0]} to {each.keys[-1]} are stored in {' and '.join(dtypes)}: expected one dtype")
    if HEAD in stored and HEAD not in expected and not faults:
        if not all(map(np.array_equal, *(stored[key].read() for key in (HEAD, EMBEDDING)))):  # by rows, or beside a third
            faults.append(f"{HEAD} differs from the embedding that config.json ties it to")
    if faults:
        told = "" if method is None else f" (weights quantised by {method})"
        raise InputError(f"{folder} does not fit its config.json{told}: {listed(faults)}")
    if passed:
        LOG.info("%d tensors are of no parameter and are passed over: %s", len(passed), listed(passed))
    quantised = f"quantised by {method}" if method is not None else f"rounded to {quantize}" if quantize is not None else None
    return Tensors(quantised, made_of, sources, stored)


def stored_tensors(folder: Path) -> Iterator[tuple[str, Stored]]:
    """Yields key and tensor of all that a folder holds, in either form."""
    path = folder / ORBAX
    if path.is_dir():
        for key, about in orbax.stored(path).items():
            dtype = NAMES.get(str(about.dtype), str(about.dtype))
            yield key, Stored(tuple(about.shape), dtype, functools.partial(orbax.read, path, key, about))
    else:
        for key, file, shape, dtype in huggingface.keys(huggingface.shards(folder)):
            yield key, Stored(shape, dtype, functools.partial(huggingface.read_tensor, file, key))
