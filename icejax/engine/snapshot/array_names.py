"""Names of a cache's arrays in a saved session; `storage` saves and reads arrays by them.

A name is the path of fields to an array, such as `layers.3.window.sinks.0`. When a field is renamed in the code, its saved name
stays: `field(metadata={"saved": "old_name"})`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


def named_arrays(tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of a pytree of dataclasses and tuples (arrays, or their shapes), each with its name."""
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
