"""The engine's compiled decode programs, which tests drop between files and count."""

import jax

from icejax.engine.between_steps import between_steps
from icejax.engine.decode_layer import layer_program
from icejax.engine.decode_step import end_programs, step_program

CACHES = (layer_program, end_programs, step_program, between_steps)


def drop() -> None:
    """Drops all compiled programs."""
    for cache in CACHES:
        cache.cache_clear()
    jax.clear_caches()
