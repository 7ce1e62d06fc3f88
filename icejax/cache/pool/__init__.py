"""The host pool: pages of keys and values in host memory, and the rows that own their extents."""
