"""The host pool: pages of keys and values in host memory, and who owns them."""
