"""Names of a cache's arrays in a saved session, which outlive the names in the code.

A name is the path of fields to an array, as `layers.3.window.sinks.0`. A field that gets another name in the code keeps its old
one here: `field(metadata={"saved": "old_name"})`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


def named_arrays(tree: Any) -> list[tuple[str, Any]]:
    """Returns the arrays of a pytree of dataclasses and tuples, or what stands in their place, each with its name."""
    return [(_name(tree, path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _name(node: Any, path: tuple[Any, ...]) -> str:
    parts = []
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            parts.append(_saved_name(type(node), key.name))
            node = getattr(node, key.name)
        else:
            parts.append(str(key.idx))
            node = node[key.idx]
    return ".".join(parts)


def _saved_name(kind: type, name: str) -> str:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    return fields[name].metadata.get("saved", name)
