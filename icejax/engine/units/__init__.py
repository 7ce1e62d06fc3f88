"""Prefill of one row in units inside a layer, so that steps of other rows can run between two units."""
