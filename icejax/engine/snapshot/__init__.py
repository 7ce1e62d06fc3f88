"""A row's cache on the disk: a file of named arrays, and the fingerprint of the model and cache that made them."""
