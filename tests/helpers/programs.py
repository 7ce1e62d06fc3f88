"""The engine's compiled decode programs, which tests drop between files and count."""

import jax

from icejax.engine.decode.between_steps import between_steps
from icejax.engine.decode.layer import layer_program
from icejax.engine.decode.step import end_programs, step_program

CACHES = (layer_program, end_programs, step_program, between_steps)


def drop() -> None:
    """Drops all compiled programs."""
    for cache in CACHES:
        cache.cache_clear()
    jax.clear_caches()
