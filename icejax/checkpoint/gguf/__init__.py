"""GGUF files: what lies in them, as a Hugging Face folder would hold it."""
