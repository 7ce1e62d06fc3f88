"""Quantised weights: published formats, their layouts in a checkpoint, and rounding."""
