"""Models: one decoder, its parts, the reading of config.json, and one file per family."""
