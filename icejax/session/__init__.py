"""A conversation whose cache is kept, and its folder on disk."""
