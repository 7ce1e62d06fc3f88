"""Errors of cache policies step by step along continuations of hundreds of tokens."""
