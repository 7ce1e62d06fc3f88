"""Grammars of answers: their rules, the rules of thoughts before them, and the tokens that may come next."""
