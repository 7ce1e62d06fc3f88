"""The description of a model: frozen, hashable dataclasses, which families build from config.json."""

from icejax.config.experts import ExpertForm, Experts, Routing
from icejax.config.model import Latent, LayerConfig, LayerType, ModelConfig
from icejax.config.rope import Rope, RopeScaling

__all__ = [
    "ExpertForm",
    "Experts",
    "Latent",
    "LayerConfig",
    "LayerType",
    "ModelConfig",
    "Rope",
    "RopeScaling",
    "Routing",
]
