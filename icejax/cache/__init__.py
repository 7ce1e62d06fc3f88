"""KV caches: the protocol, the host pool, page indexes, and one file per policy."""
