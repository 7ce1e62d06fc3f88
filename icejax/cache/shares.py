"""How the arrays of a cache are cut for the devices of a mesh: along the axis of their KV heads.

A KV head of which several devices hold copies counts as a head of each. In latent attention all devices hold the one key. With
`tokens=M`, M devices hold each KV head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from icejax.cache.protocol import CachePolicy
from icejax.cache.sizes import CacheSpec
from icejax.runtime.mesh import WHOLE, Mesh, cut, cuts_between, holders

PAGES = cut(2)  # of the new pages of a layer [P', B, K, ...]
ORDER = cut(1)  # of the order of a layer's tokens in pages [B, K, T]


def whole_spec(spec: CacheSpec, mesh: Mesh | None) -> CacheSpec:
    """Returns the sizes of a layer's cache over all devices; `spec` has those of one device's share."""
    if mesh is None:
        return spec
    return replace(spec, num_heads=spec.num_heads * mesh.size, num_kv_heads=spec.num_kv_heads * mesh.size)


def saved_spec(spec: CacheSpec, mesh: Mesh | None) -> CacheSpec:
    """Returns the sizes of a layer's cache on one device for the whole model, in which a row is saved from any mesh."""
    whole = whole_spec(spec, mesh)
    return replace(whole, num_kv_heads=whole.num_kv_heads // holders(mesh, latent=spec.latent))


def state_cuts(policy: CachePolicy, spec: CacheSpec, mesh: Mesh | None) -> Any:
    """Returns the cuts of a layer's state; `spec` has the sizes of one device's share.

    An array whose first axis is rows times KV heads holds the rows of the first device, then those of the second: only
    programs on the mesh may read it. Of a single row it is the array of one device.
    """
    if mesh is None:
        return WHOLE
    wholes, shares = (jax.eval_shape(lambda sizes=sizes: policy.init(sizes)) for sizes in (whole_spec(spec, mesh), spec))
    return cuts_between(wholes, shares)
