"""Reading a Hugging Face config.json."""
