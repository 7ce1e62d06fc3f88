"""Settings of the whole suite: no network, no accelerator, nothing promoted in silence."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import jax
import pytest

import icejax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def bundled():
    """The bundled model and tokenizer."""
    return icejax.load()
