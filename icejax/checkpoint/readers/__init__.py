"""Checkpoint folders, read tensor by tensor and written."""
