"""Checkpoint folders, Hugging Face's and icejax's own, and the models in them."""

from icejax.checkpoint.load import load_model, read_config

__all__ = ["load_model", "read_config"]
