"""One file per cache policy; `icejax.cache.registry` lists them by name."""
