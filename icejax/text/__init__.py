"""Tokenizer, chat template, and tokens back to text."""
