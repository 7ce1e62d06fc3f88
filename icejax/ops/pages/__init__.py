"""Pages of tokens: forming them, digests, the digest tree, and attention over the pages fetched."""
