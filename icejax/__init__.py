"""Long-context inference in JAX and Flax: the KV cache in host memory, in pages of tokens that mean similar things."""

from icejax.cache import POLICIES, CachePolicy, Clustered, Full
from icejax.errors import InputError
from icejax.generation import GenerationResponse, generate, load, stream_generate
from icejax.prompts import chat
from icejax.sampling import Sampling
from icejax.session import Session

__version__ = "0.1.0"
__all__ = [
    "POLICIES",
    "CachePolicy",
    "Clustered",
    "Full",
    "GenerationResponse",
    "InputError",
    "Sampling",
    "Session",
    "chat",
    "generate",
    "load",
    "stream_generate",
]
