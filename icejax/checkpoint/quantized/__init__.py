"""Quantised weights: published formats, their layouts in a checkpoint, and rounding of matrices as they are read."""
