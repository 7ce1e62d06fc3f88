"""Checkpoint folders, in the Hugging Face form or icejax's own, and how a model is loaded from one."""

from icejax.checkpoint.load import load_model, read_config

__all__ = ["load_model", "read_config"]
