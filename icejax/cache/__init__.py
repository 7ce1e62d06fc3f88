"""KV caches: the policy protocol, the host pool, page indexes, base classes, and one file per policy."""
