"""Grammars of answers: their rules, what may stand before them, and the tokens that may come next."""
