"""A server and its clients, timed as clients see them, under vLLM's names."""
