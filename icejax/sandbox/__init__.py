"""Untrusted programs (chat templates, regular expressions), run in a process of their own with limits."""
