"""One file per model family: how its config.json is read, and the parameter names of its checkpoints."""
