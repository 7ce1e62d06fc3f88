"""Compares cache policies on the same models, texts and budgets, in the same code."""
