"""Base classes of the cache policies (eviction, retrieval, oracles), and the window of sinks and newest tokens."""
