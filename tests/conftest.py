"""Settings of the whole suite: no network, no accelerator, nothing promoted in silence."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
