"""Vectors and matrices in narrow dtypes, and products with them."""
