"""Reads a device's share of a parameter, a box of it, from the boxes of the stored tensors that hold it.

`icejax.checkpoint.load` calls it for a model on several devices. Codes are read in whole blocks and words, of which a box
may be a part.

Example, the rows 6 to 9 of an AWQ matrix [16, 256]: a word holds 8 rows, so the rows 0 to 16 are read, which are the columns 0
and 1 of the words `qweight` [256, 2] and `qzeros` [2, 2], and the columns 0 to 16 of `scales` [2, 16].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from icejax.checkpoint import boxes
from icejax.checkpoint.boxes import Box
from icejax.checkpoint.quantized.formats import Source
from icejax.checkpoint.quantized.layouts import Layout, QuantizedMatrix, Shape
from icejax.checkpoint.tensor_mapping import TensorMapping
from icejax.checkpoint.tensors import Tensors


def are_readable(tensors: Tensors, key: str, axis: int) -> bool:
    """Says whether a share of a parameter, which is cut along `axis`, can be read without the rest.

    It cannot if rows are rounded whose scale comes from all of their columns, in a tensor of one chunk (of an older Orbax
    folder), or in a tensor of all experts that holds codes or whose rows alternate between projections.
    """
    mapping = tensors.mappings[key]
    sources = [tensors.sources[stored_key] for stored_key in mapping.keys]
    by_column = axis - bool(mapping.experts) == 1
    for source in sources:
        if not all(tensors.stored[part].in_boxes for part in source.parts if part in tensors.stored):
            return False
        if source.method is not None and by_column and source.layout.groups((1, mapping.columns)) == 1:
            return False
        if source.layout is not None and source.method is None and mapping.whole:
            return False
    return mapping.rows is None or mapping.rows.step is None


def groups(tensors: Tensors, key: str) -> int:
    """Returns the number of groups in the rows of a parameter that stays codes; 1 if they have one scale, or none."""
    mapping = tensors.mappings[key]
    layout = tensors.sources[mapping.keys[0]].layout
    return 1 if layout is None else layout.groups((1, mapping.columns))


def read(
    tensors: Tensors, key: str, box: Box | None, *, dtype: np.dtype, codes: bool, on_cpu: bool
) -> np.ndarray | QuantizedMatrix:
    """Returns a box of a parameter, as `TensorMapping.join` returns parameters; `box` None: all of it."""
    mapping = tensors.mappings[key]
    options = dict(dtype=dtype, codes=codes, on_cpu=on_cpu, method=tensors.sources[mapping.keys[0]].method)
    if box is None:
        source = tensors.sources[mapping.keys[0]]
        if mapping.whole:
            parts = tensors.parts(mapping.keys[0])
            return mapping.join((source.read(parts, expert=i) for i in range(mapping.experts)), **options)
        return mapping.join(map(tensors.read, mapping.keys), **options)
    box = box[1:] if mapping.experts else box
    if mapping.rows is not None:
        box = (slice(box[0].start + mapping.rows.start, box[0].stop + mapping.rows.start), *box[1:])
    places = [(mapping.keys[0], i) for i in range(mapping.experts)] if mapping.whole else [(k, None) for k in mapping.keys]
    return replace(mapping, rows=None).join((_matrix(tensors, mapping, *place, box) for place in places), **options)


def _matrix(tensors: Tensors, mapping: TensorMapping, key: str, expert: int | None, box: Box) -> np.ndarray | QuantizedMatrix:
    """Returns a box of a matrix [O, I], or of a vector [O], from the stored tensor `key`, or from an expert's place in it."""
    source = tensors.sources[key]
    if source.layout is not None and source.method is None:
        return _codes(tensors, source, box)
    stored_box = box[::-1] if mapping.turned else box
    if expert is None:
        return tensors.stored[key].read(stored_box)
    return tensors.stored[key].read((slice(expert, expert + 1), *stored_box))[0]


def _codes(tensors: Tensors, source: Source, box: Box) -> np.ndarray | QuantizedMatrix:
    """Returns a box of a matrix that is stored as codes; as weights, if it cuts groups."""
    layout, stored = source.layout, {part: tensors.stored[part] for part in source.parts if part in tensors.stored}
    prefix, window = layout.prefix(source.key), around(layout, source.shape, box)
    part_boxes = part_windows(layout, source.shape, window, {k.removeprefix(prefix): x.shape for k, x in stored.items()})
    parts = {part: tensor.read(part_boxes[part.removeprefix(prefix)]) for part, tensor in stored.items()}
    matrix, (rows, columns) = source.read(parts, window=boxes.sizes(window)), boxes.within(box, window)
    width, count = matrix.codes.shape[1], matrix.scale.shape[1]
    group = width // count
    if count == 1 or (columns.start, columns.stop) == (0, width):
        of_groups = slice(None)
    elif columns.start % group or columns.stop % group:
        return matrix.weights()[rows, columns]
    else:
        of_groups = slice(columns.start // group, columns.stop // group)
    scale, zero = (None if x is None else x[rows, of_groups] for x in (matrix.scale, matrix.zero))
    return matrix._replace(codes=matrix.codes[rows, columns], scale=scale, zero=zero)


def around(layout: Layout, shape: Shape, box: Box) -> Box:
    """Returns a box of a matrix of codes, widened to the whole blocks and words that can be read without the rest."""
    rows, columns = layout.units
    if shape[1] % columns:
        columns = shape[1]  # else groups of a part would have other sizes than those of the whole
    return tuple(
        slice(axis.start // unit * unit, min(-(-axis.stop // unit) * unit, size))
        for axis, unit, size in zip(box, (rows, columns), shape, strict=True)
    )


def part_windows(layout: Layout, shape: Shape, window: Box, stored: Mapping[str, Shape]) -> dict[str, Box]:
    """Returns the box of each stored tensor that a window of a matrix is read from.

    Args:
        window: all rows or all columns, and of the other axis what `around` returns.
        stored: shapes of the stored tensors, by their names after the layout's prefix.
    """
    axis = int(window[0] == slice(0, shape[0]))  # the one that is cut, if any is

    def ends(place: int) -> dict[str, Shape]:
        """Returns where each stored tensor ends that holds the matrix up to a place."""
        parts = layout.parts((place, shape[1]) if axis == 0 else (shape[0], place))
        return {name: next(x for x in parts[name].shapes if len(x) == len(stored[name])) for name in stored}

    start, last = window[axis].start, ends(window[axis].stop)
    first = ends(start) if start else {name: (0,) * len(end) for name, end in last.items()}
    # An axis that does not depend on the place ends at the same place in both.
    return {
        name: boxes.whole(stored[name])
        if name in layout.uncut
        else tuple(slice(0 if a == b else a, b) for a, b in zip(first[name], last[name], strict=True))
        for name in stored
    }
