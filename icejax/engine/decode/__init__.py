"""Decoding: the step of one token per row, its layers, what happens between steps, and the loop that yields text."""
