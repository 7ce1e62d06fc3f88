"""One file per model family: its config.json and its checkpoint's names."""
