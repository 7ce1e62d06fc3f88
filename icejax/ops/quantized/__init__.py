"""Quantized vectors and matrices, and products with them."""
