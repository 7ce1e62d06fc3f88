"""Sessions: a conversation that keeps its cache, and its folder on disk."""
