"""What a cache did: attention maps of an answer."""
