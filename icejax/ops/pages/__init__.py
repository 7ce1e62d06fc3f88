"""Pages of tokens: packing, digests, the digest tree, key codes, and attention over the fetched pages."""
