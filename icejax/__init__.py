"""Long-context inference in JAX and Flax: the KV cache in host memory, in pages of tokens with similar keys."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from icejax.api.engine import Engine
    from icejax.api.generate import generate, load, stream_generate
    from icejax.api.model_sampling import model_sampling
    from icejax.api.prompts import ContextFull, chat
    from icejax.cache.options import make_policy
    from icejax.cache.protocol import CachePolicy
    from icejax.cache.registry import POLICIES, Clustered, Full
    from icejax.checks.errors import InputError
    from icejax.engine.request import Request
    from icejax.engine.response import GenerationResponse
    from icejax.engine.sampling import Sampling
    from icejax.runtime.processes import join
    from icejax.session.session import Session
    from icejax.text.grammar.rules import Grammar

__version__ = "0.1.0"
# Imported at first use: importing JAX takes seconds, and a command line must react to Ctrl-C before that.
_MODULES = {
    "POLICIES": "cache.registry",
    "CachePolicy": "cache.protocol",
    "Clustered": "cache.registry",
    "ContextFull": "api.prompts",
    "Engine": "api.engine",
    "Full": "cache.registry",
    "GenerationResponse": "engine.response",
    "Grammar": "text.grammar.rules",
    "InputError": "checks.errors",
    "Request": "engine.request",
    "Sampling": "engine.sampling",
    "Session": "session.session",
    "chat": "api.prompts",
    "generate": "api.generate",
    "join": "runtime.processes",
    "load": "api.generate",
    "make_policy": "cache.options",
    "model_sampling": "api.model_sampling",
    "stream_generate": "api.generate",
}
__all__ = [
    "POLICIES",
    "CachePolicy",
    "Clustered",
    "ContextFull",
    "Engine",
    "Full",
    "GenerationResponse",
    "Grammar",
    "InputError",
    "Request",
    "Sampling",
    "Session",
    "chat",
    "generate",
    "join",
    "load",
    "make_policy",
    "model_sampling",
    "stream_generate",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(f"icejax.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'icejax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
