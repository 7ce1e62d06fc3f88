"""The Python API: generation from text, and prompts."""
