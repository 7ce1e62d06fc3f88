"""Generation from text, as Python calls it."""
