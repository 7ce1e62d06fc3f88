"""Command lines that turn one form of a checkpoint folder into the other."""
