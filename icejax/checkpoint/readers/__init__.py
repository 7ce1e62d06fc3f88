"""Readers and writers of checkpoint folders, one tensor at a time."""
