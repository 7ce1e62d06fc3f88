"""What policies of a kind share: eviction, retrieval, oracles, the window."""
