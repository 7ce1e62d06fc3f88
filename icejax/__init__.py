"""Long-context inference in JAX and Flax: the KV cache in host memory, in pages of tokens with similar keys."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from icejax.cache.options import make_policy
    from icejax.cache.registry import POLICIES, CachePolicy, Clustered, Full
    from icejax.checks.errors import InputError
    from icejax.engine.request import Request
    from icejax.engine.response import GenerationResponse
    from icejax.engine.sampling import Sampling
    from icejax.generation import generate, load, stream_generate
    from icejax.prompts import chat
    from icejax.session import Session

__version__ = "0.1.0"
# Imported when first asked for: JAX takes seconds, in which a command line is to listen to Ctrl-C already.
_MODULES = {
    "cache.registry": ("POLICIES", "CachePolicy", "Clustered", "Full"),
    "cache.options": ("make_policy",),
    "checks.errors": ("InputError",),
    "generation": ("generate", "load", "stream_generate"),
    "prompts": ("chat",),
    "request": ("Request",),
    "response": ("GenerationResponse",),
    "sampling": ("Sampling",),
    "session": ("Session",),
}
__all__ = [
    "POLICIES",
    "CachePolicy",
    "Clustered",
    "Full",
    "GenerationResponse",
    "InputError",
    "Request",
    "Sampling",
    "Session",
    "chat",
    "generate",
    "load",
    "make_policy",
    "stream_generate",
]


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"icejax.{module}"), name)
    raise AttributeError(f"module 'icejax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
