"""Top-k, in the form each version of JAX compiles best."""

from __future__ import annotations

import inspect

import jax
from jax import lax

# From JAX 0.11 on the GPU takes its selection kernel only where ties may fall either way; a full sort otherwise.
_UNSTABLE = {"is_stable": False} if "is_stable" in inspect.signature(lax.top_k).parameters else {}
# Before 0.11 XLA:GPU selects without a sort only if told to; an option that later compilers do not know.
GPU_OPTIONS = {} if _UNSTABLE else {"xla_gpu_experimental_use_raft_select_k": True}


def compiler_options() -> dict[str, bool]:
    """Returns the options that a program with `top_k` is to be compiled with on this platform."""
    return GPU_OPTIONS if jax.default_backend() == "gpu" else {}


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the `k` largest values along the last axis and their indices, largest first."""
    return lax.top_k(x, k, **_UNSTABLE)
