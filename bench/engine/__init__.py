"""Requests that come and go, timed as the engine's callers see them."""
