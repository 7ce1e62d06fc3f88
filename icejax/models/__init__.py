"""Models: one decoder, its parts, and one file per family."""
