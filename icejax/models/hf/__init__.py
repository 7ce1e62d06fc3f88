"""Reads a Hugging Face config.json."""
