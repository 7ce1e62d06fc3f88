"""Checks of input: the error for bad input, ranges of numbers, and JSON files of unknown origin."""
