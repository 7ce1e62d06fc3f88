"""Evaluation of a cache: attention maps of an answer."""
