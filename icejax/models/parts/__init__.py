"""Parts of a decoder layer."""
