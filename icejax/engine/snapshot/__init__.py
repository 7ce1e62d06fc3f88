"""A row's cache on the disk: a file of named arrays, and the fingerprint of what the arrays were made with."""
