"""The error of attention on a layer's captured queries, keys and values: commands, and their common parts."""
