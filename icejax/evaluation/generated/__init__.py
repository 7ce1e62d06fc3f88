"""Tasks whose samples are made here, at any length, with the model's tokenizer; most need no data."""
